#!lua flags=allow-oom
-- Requires: state pages records record_lists endings leases steps
-- READY -> TAKEN for the groups of a step (groups_per_step). ARGV[1]: key prefix. ARGV[2..5]: epoch, version, number of groups that the
-- caller has, and 'whole' (all or nothing) or 'part' (as many as may be taken now).
--
-- Returns one of
--   {'ok', replayed, mask_below, missing, seq, attempt, ...}   the groups that the caller does not have. Tokens of
--                           versions below mask_below are masked; 0 masks none
--   {'wait', ms}            not enough READY groups; ms until the next lease expires, or -1
--   {'fenced', epoch}, {'late', committed} or {'ended'}
-- Groups that an earlier call has recorded for this step are delivered again, in the same order.
--
-- allow-oom: taking a batch is what lets the trainer commit steps, which frees memory.
local epoch = tonumber(ARGV[2])
local version = tonumber(ARGV[3])
local have = tonumber(ARGV[4])
local whole = ARGV[5] == 'whole'
local now = now_ms()

if is_fenced(epoch) then
  -- The blocking pop of this caller may have consumed the element that should wake the new trainer. Pass it on.
  wake_waiter(WAKE_TAKE)
  return {'fenced', meta_number('epoch')}
end

local step = read_step(version)
local is_started = step ~= nil
if not is_started then
  step = {is_trained = false, mask_below = 0, size = meta_number('groups_per_step'), seqs = {}}
end
local missing = step.size - #step.seqs

local function deliver()
  local new_seqs = {}
  for i = have + 1, #step.seqs do
    new_seqs[#new_seqs + 1] = step.seqs[i]
  end
  local replayed = step.epoch < epoch and 1 or 0
  local reply = {'ok', replayed, step.mask_below, step.size - #step.seqs}
  for i, record in ipairs(read_records(new_seqs)) do
    reply[2 * i + 3] = tonumber(new_seqs[i])
    reply[2 * i + 4] = record.attempt
  end
  return reply
end

-- To a caller that is not fenced, a complete step is always delivered. A caller of parts gets the recorded groups that
-- it lacks before new ones are taken.
local has_new_groups = #step.seqs > have
if is_started and (missing == 0 or (not whole and has_new_groups)) then return deliver() end
-- A delayed repetition of an old call would take groups that nobody trains.
if not is_started and version < meta_number('committed') then return {'late', meta_number('committed')} end
-- Tested only here, because a step that is complete is delivered even after the end of the run.
if meta_number('ended') == 1 then
  wake_waiter(WAKE_TAKE)
  return {'ended'}
end

local staleness = meta_number('max_staleness')
local on_stale = meta_text('on_stale')

-- End the groups that are too old, by the rules too_old_to_train (READY groups) and too_old_to_finish (groups in
-- progress) of selection.py. With `mask`, old tokens are masked later, so only groups without a young token end here.
local function end_stale_groups()
  if on_stale == 'wait' then return end -- the window keeps servers from making groups too old
  local below = '(' .. (version - staleness)
  end_as_stale(redis.call('ZRANGEBYSCORE', AGES, '-inf', below))
  if on_stale ~= 'drop' then return end
  for _, seq in ipairs(redis.call('ZRANGEBYSCORE', BEGUN, '-inf', below)) do
    release_unfinished(seq, 'expired', nil)
  end
end

-- The selectors, with the same rules as in selection.py.

-- Collect READY groups in ascending order. No group may overtake the first one in flight by `selector_window` sequence
-- numbers or more. The policy sets that to 1 for fifo and exact_age, so that nothing overtakes it.
local function scan_in_order()
  local chosen = {}
  local first_in_flight = nil
  local offset = 0
  local window = meta_number('selector_window')
  while #chosen < missing do
    local page = redis.call('ZRANGE', OPEN, offset, offset + math.min(step.size, PAGE) - 1)
    if #page == 0 then return chosen end
    local ready = redis.call('ZMSCORE', READY, unpack(page))
    for i, seq in ipairs(page) do
      local is_outside = first_in_flight and tonumber(seq) >= first_in_flight + window
      if #chosen == missing or is_outside then return chosen end
      if ready[i] then
        chosen[#chosen + 1] = seq
      elseif not first_in_flight then
        first_in_flight = tonumber(seq)
      end
    end
    offset = offset + #page
  end
  return chosen
end

-- Draw READY groups uniformly without replacement, with the generator of Park and Miller. It is seeded by the step: a
-- repeated call draws the same groups if the same groups are READY.
local function draw_uniformly()
  local modulus = 2147483647
  local state = (meta_number('seed') + version * 1000003) % modulus
  if state == 0 then state = 1 end
  local function next_number()
    state = state * 48271 % modulus
    return state
  end
  for _ = 1, 3 do
    next_number() -- the first numbers of seeds that are close to each other are close, too
  end

  local chosen = {}
  for i = 1, missing do
    local rank = next_number() % redis.call('ZCARD', READY)
    chosen[i] = redis.call('ZRANGE', READY, rank, rank)[1]
    -- Removed here so that it is not drawn twice. `remove_from_ready` below removes it again, which changes nothing.
    redis.call('ZREM', READY, chosen[i])
  end
  return chosen
end

local function choose_freshest()
  return redis.call('ZREVRANGE', READY, 0, missing - 1)
end

local SELECTORS = {
  fifo = scan_in_order,
  windowed_fifo = scan_in_order,
  exact_age = scan_in_order,
  freshest = choose_freshest,
  uniform = draw_uniformly,
}
local select_groups = SELECTORS[meta_text('selector')]

-- A scan in ticket order can stop and continue with the next part; the other selectors choose a whole batch.
local required = missing
if not whole and select_groups == scan_in_order then required = 1 end

-- Number of READY groups required now. A step that was started may always be completed. exact_age takes groups that are
-- exactly S versions old, and they are only that old if S newer batches are ready behind them. At the end of the run
-- there are fewer groups left than exact_age or min_size would want.
local function required_ready()
  if is_started then return required end
  local min_ready = meta_number('min_size')
  if meta_text('selector') == 'exact_age' then min_ready = (staleness + 1) * meta_number('groups_per_step') end
  return math.max(required, math.min(min_ready, meta_number('horizon') - meta_number('used')))
end

-- True if the ratio of uses to inserts allows a batch: RateLimit.allows_sample in staleness.py.
local function ratio_allows_batch()
  if is_started then return true end
  local balance = meta_number('samples_per_insert') * meta_number('inserted') - (meta_number('used') + step.size)
  return balance >= meta_number('min_diff')
end

-- Reply that there are too few groups. Inserts read `wanted` and wake this caller only once so many are READY.
local function reply_with_wait()
  local wanted = required_ready()
  if meta_number('wanted') ~= wanted then redis.call('HSET', META, 'wanted', wanted) end
  return wait_reply(now)
end

-- Reclaim first. It ends groups that have used up their attempts, which would stay in flight and block the scan forever.
reclaim_expired_leases(now)
end_stale_groups()
if redis.call('ZCARD', READY) < required_ready() or not ratio_allows_batch() then return reply_with_wait() end
local chosen = select_groups()
if #chosen < required then return reply_with_wait() end
table.sort(chosen, function(a, b) return tonumber(a) < tonumber(b) end)

remove_from_ready(chosen)
call_with_values('SADD', TAKEN, chosen)
local records = read_records(chosen)
local first_uses = 0
for _, record in ipairs(records) do
  if record.uses == 0 then first_uses = first_uses + 1 end
  record.uses = record.uses + 1
  record.references = record.references + 1 -- the step's entry in the log needs the record now
end
write_records(chosen, records)
redis.call('HINCRBY', META, 'used_active', first_uses)
redis.call('HINCRBY', META, 'used', #chosen)
wake_waiter(WAKE_ADMIT) -- if the ratio of uses to inserts is limited, admission waits for uses

-- max_staleness may have been raised between two parts of the step. Keep the stricter mask: the trainer has groups that
-- are masked by it.
if on_stale == 'mask' then step.mask_below = math.max(step.mask_below, version - staleness) end
step.epoch = epoch
for _, seq in ipairs(chosen) do
  step.seqs[#step.seqs + 1] = seq
end
write_step(version, step)
return deliver()

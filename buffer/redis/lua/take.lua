#!lua flags=allow-oom
-- After: books paging records many_records endings leases log
-- READY -> TAKEN for the P groups of a step: all or nothing, or ('part') as many as there are. ARGV[2..5]: epoch,
-- version, how many of the step the caller has, 'whole' or 'part'. Returns {'ok', replayed, mask_below, missing, seq,
-- attempt, ...} with those that it does not have, {'wait', ms}, {'fenced', epoch}, {'late', committed} or {'ended'}.
-- What the log has of the step is delivered again as it was.
local epoch, version, have, whole, now = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == 'whole',
  now_ms()
if fenced(epoch) then
  wake(WAKE_TAKE) -- the trainer that has taken over
  return {'fenced', meta('epoch')}
end

local step = logged(version)
local begun = step ~= nil
if not begun then step = {settled = false, mask_below = 0, size = meta('groups_per_step'), seqs = {}} end
local missing = step.size - #step.seqs

local function deliver()
  local new = {}
  for i = have + 1, #step.seqs do new[#new + 1] = step.seqs[i] end
  local answer = {'ok', step.epoch < epoch and 1 or 0, step.mask_below, step.size - #step.seqs}
  for i, record in ipairs(records_of(new)) do
    answer[2 * i + 3], answer[2 * i + 4] = tonumber(new[i]), record.attempt
  end
  return answer
end

if begun and (missing == 0 or not whole and #step.seqs > have) then return deliver() end
-- A call that arrives after its step is over would take groups that nobody trains.
if not begun and version < meta('committed') then return {'late', meta('committed')} end
if meta('ended') == 1 then
  wake(WAKE_TAKE)
  return {'ended'}
end

local staleness, on_stale = meta('max_staleness'), dial('on_stale')
-- As too_old_to_train and too_old_to_finish in selection.py.
local function end_what_is_too_old()
  if on_stale == 'wait' then return end
  local below = '(' .. (version - staleness)
  end_as_stale(redis.call('ZRANGEBYSCORE', AGES, '-inf', below))
  if on_stale ~= 'drop' then return end
  for _, seq in ipairs(redis.call('ZRANGEBYSCORE', BEGUN, '-inf', below)) do release_unfinished(seq, 'expired', nil) end
end

-- The selectors: as in selection.py.
local function walk()
  local chosen, first_in_flight, offset, window = {}, nil, 0, meta('selector_window')
  while #chosen < missing do
    local page = redis.call('ZRANGE', OPEN, offset, offset + math.min(step.size, PAGE) - 1)
    if #page == 0 then return chosen end
    local ready = redis.call('ZMSCORE', READY, unpack(page))
    for i, seq in ipairs(page) do
      if #chosen == missing or (first_in_flight and tonumber(seq) >= first_in_flight + window) then return chosen end
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

local function draw()
  local chosen, modulus = {}, 2147483647
  local state = (meta('seed') + version * 1000003) % modulus
  if state == 0 then state = 1 end
  local function number()
    state = state * 48271 % modulus
    return state
  end
  for _ = 1, 3 do number() end
  for i = 1, missing do
    local rank = number() % redis.call('ZCARD', READY)
    chosen[i] = redis.call('ZRANGE', READY, rank, rank)[1]
    redis.call('ZREM', READY, chosen[i])
  end
  return chosen
end

local function freshest()
  return redis.call('ZREVRANGE', READY, 0, missing - 1)
end

local select = ({fifo = walk, windowed_fifo = walk, exact_age = walk, freshest = freshest, uniform = draw})[dial('selector')]
-- Those that walk upwards can stop and go on; the others choose a whole batch.
local least = (whole or select ~= walk) and missing or 1

-- How many READY groups it takes to go on with the step.
local function needed()
  local min_ready = dial('selector') == 'exact_age' and (staleness + 1) * meta('groups_per_step') or meta('min_size')
  return begun and least or math.max(least, math.min(min_ready, meta('horizon') - meta('used')))
end

local function balanced()
  return begun or meta('samples_per_insert') * meta('inserted') - (meta('used') + step.size) >= meta('min_diff')
end

local function not_yet()
  if meta('wanted') ~= needed() then redis.call('HSET', META, 'wanted', needed()) end
  return wait(now)
end

unheld(now)
end_what_is_too_old()
if redis.call('ZCARD', READY) < needed() or not balanced() then return not_yet() end
local chosen = select()
if #chosen < least then return not_yet() end
table.sort(chosen, function(a, b) return tonumber(a) < tonumber(b) end)

leave_ready(chosen)
call_with('SADD', TAKEN, chosen)
local records, first_uses = records_of(chosen), 0
for _, record in ipairs(records) do
  if record.uses == 0 then first_uses = first_uses + 1 end
  record.uses, record.pins = record.uses + 1, record.pins + 1
end
store(chosen, records)
redis.call('HINCRBY', META, 'used_active', first_uses)
redis.call('HINCRBY', META, 'used', #chosen)
wake(WAKE_ADMIT) -- where the ratio of uses to inserts is limited, it waits for uses
-- The policy may have been retuned between two parts.
if on_stale == 'mask' then step.mask_below = math.max(step.mask_below, version - staleness) end
step.epoch = epoch
for _, seq in ipairs(chosen) do step.seqs[#step.seqs + 1] = seq end
log(version, step)
return deliver()

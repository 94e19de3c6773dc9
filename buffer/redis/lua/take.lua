#!lua flags=allow-oom
-- READY -> TAKEN for P groups, all or nothing. ARGV[2], ARGV[3]: epoch, version. Returns
-- {'ok', replayed, mask_below, seq, ...}, {'wait', ms}, {'fenced', epoch} or {'ended'}. A step that is
-- in the log is delivered again as it was.
local epoch, version, now = tonumber(ARGV[2]), tonumber(ARGV[3]), now_ms()
if fenced(epoch) then
  wake(WAKE_TAKE) -- the trainer that has taken over
  return {'fenced', meta('epoch')}
end

local function deliver(step)
  local answer = {'ok', step.epoch < epoch and 1 or 0, step.mask_below}
  for _, seq in ipairs(step.seqs) do answer[#answer + 1] = tonumber(seq) end
  return answer
end

local known = logged(version)
if known then return deliver(known) end
if meta('ended') == 1 then
  wake(WAKE_TAKE)
  return {'ended'}
end

local size, staleness, on_stale = meta('groups_per_step'), meta('max_staleness'), dial('on_stale')

-- As too_old_to_train and too_old_to_finish in selection.py.
local function end_what_is_too_old()
  if on_stale == 'wait' then return end
  local below = '(' .. (version - staleness)
  for _, seq in ipairs(redis.call('ZRANGEBYSCORE', on_stale == 'drop' and OLDEST or NEWEST, '-inf', below)) do
    end_as_stale(seq)
  end
  if on_stale ~= 'drop' then return end
  for _, seq in ipairs(redis.call('ZRANGEBYSCORE', BEGUN, '-inf', below)) do release(seq, 'expired', nil) end
end

local function may_sample()
  local used = meta('used')
  local need = math.max(size, math.min(meta('min_size'), meta('horizon') - used))
  local balance = meta('samples_per_insert') * meta('inserted') - (used + size)
  return redis.call('ZCARD', READY) >= need and balance >= meta('min_diff')
end

-- The selectors: as in selection.py.
local function walk()
  local chosen, first_in_flight, offset, window = {}, nil, 0, meta('selector_window')
  while #chosen < size do
    local page = redis.call('ZRANGE', OPEN, offset, offset + size - 1)
    if #page == 0 then return chosen end
    for _, seq in ipairs(page) do
      if #chosen == size or (first_in_flight and tonumber(seq) >= first_in_flight + window) then return chosen end
      if redis.call('ZSCORE', READY, seq) then
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
  for i = 1, size do
    local rank = number() % redis.call('ZCARD', READY)
    chosen[i] = redis.call('ZRANGE', READY, rank, rank)[1]
    redis.call('ZREM', READY, chosen[i])
  end
  return chosen
end

local function select()
  local selector = dial('selector')
  if selector == 'uniform' then return draw() end
  if selector == 'freshest' then return redis.call('ZREVRANGE', READY, 0, size - 1) end
  return walk()
end

unheld(now)
end_what_is_too_old()
if not may_sample() then return wait(now) end
local chosen = select()
if #chosen < size then return wait(now) end
table.sort(chosen, function(a, b) return tonumber(a) < tonumber(b) end)

for _, seq in ipairs(chosen) do
  leave_ready(seq)
  redis.call('SADD', TAKEN, seq)
  redis.call('HINCRBY', USES, seq, 1)
  pin(seq)
end
redis.call('HINCRBY', META, 'used', size)
wake(WAKE_ADMIT) -- where the ratio of uses to inserts is limited, it waits for uses
local mask_below = on_stale == 'mask' and math.max(0, version - staleness) or 0
local step = {epoch = epoch, settled = false, mask_below = mask_below, seqs = chosen}
log(version, step)
return deliver(step)

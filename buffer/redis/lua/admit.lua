#!lua
-- After: books paging records many_records endings leases
-- WAITING -> INFLIGHT, and groups that nobody holds to their next holder. ARGV[2], ARGV[3]: limit, request.
-- Returns {'ok', epoch, lease_ms, seq, attempt, strikes, version, task, partial, ...}, {'wait', ms} or {'ended'}.
-- The same request gets the same leases again, as far as they still hold.
local limit, now = tonumber(ARGV[2]), now_ms()
local grant, dials = payload('grant', ARGV[3]), {}
for i, value in ipairs(redis.call('HMGET', META, 'lease_ms', 'version', 'staleness', 'groups_per_step', 'horizon',
    'min_size', 'samples_per_insert', 'max_diff', 'used', 'inserted', 'tasks_put', 'admitted', 'ended', 'epoch',
    'used_active', 'stored_bytes', 'room_bytes', 'group_bytes')) do
  dials[i] = tonumber(value) or 0
end
local lease_ms, version, staleness, size, horizon, min_size, samples_per_insert, max_diff, used, inserted, tasks_put,
  admitted, ended, epoch, used_active, stored_bytes, room_bytes, group_bytes = unpack(dials)
local answer, leases = {'ok', epoch, lease_ms}, {}

local function add(seq, attempt, strikes, begun, task, partial)
  for _, value in ipairs({tonumber(seq), tonumber(attempt), strikes, tonumber(begun), task, partial}) do
    answer[#answer + 1] = value
  end
  leases[#leases + 1] = seq .. ':' .. attempt
end

-- A group that nobody holds, to its next holder. Where nothing is left of earlier attempts it begins anew.
local function lease_again(seq)
  local record, partial = record_of(seq), redis.call('GET', payload('partial', seq))
  if tonumber(redis.call('ZSCORE', LEASES, seq)) > 0 then record.strikes = record.strikes + 1 end
  if not partial then redis.call('ZADD', BEGUN, version, seq) end
  redis.call('UNLINK', group_payload(seq, record.attempt)) -- as in release_unfinished
  record.attempt = record.attempt + 1
  redis.call('HSET', GROUPS, seq, printed(record))
  redis.call('ZADD', LEASES, now + lease_ms, seq)
  local begun = partial and redis.call('ZSCORE', BEGUN, seq) or version
  add(seq, record.attempt, record.strikes, begun, redis.call('GET', payload('task', seq)), partial)
end

-- New groups: WAITING -> INFLIGHT.
local function lease_new(first, count)
  local by_seq, begun, deadlines, groups, tasks = {}, {}, {}, {}, {}
  local record = printed({attempt = 1, strikes = 0, longest = 0, oldest = 0, newest = 0, uses = 0, pins = 0})
  for i = 1, count do
    local seq, odd, even = first + i - 1, 2 * i - 1, 2 * i
    by_seq[odd], begun[odd], deadlines[odd], groups[odd] = seq, version, now + lease_ms, seq
    by_seq[even], begun[even], deadlines[even], groups[even] = seq, seq, seq, record
    tasks[i] = payload('task', seq)
  end
  call_with('ZADD', OPEN, by_seq)
  call_with('ZADD', BEGUN, begun)
  call_with('ZADD', LEASES, deadlines)
  call_with('HSET', GROUPS, groups)
  redis.call('HINCRBY', META, 'admitted', count)
  for page = 1, count, PAGE do
    local found = redis.call('MGET', unpack(tasks, page, math.min(page + PAGE - 1, count)))
    for i, task in ipairs(found) do add(first + page + i - 2, 1, 0, version, task, false) end
  end
end

for seq, attempt in (redis.call('GET', grant) or ''):gmatch('(%d+):(%d+)') do
  local record = held(seq, attempt)
  if record then
    add(seq, attempt, record.strikes, redis.call('ZSCORE', BEGUN, seq), unpack(redis.call('MGET', payload('task', seq),
      payload('partial', seq))))
  end
end
if #answer > 3 then return answer end
if ended == 1 then
  wake(WAKE_ADMIT) -- the next one who waits
  return {'ended'}
end

local again = unheld(now)
for i = 1, math.min(limit, #again) do lease_again(again[i]) end

local inflight = redis.call('ZCARD', LEASES)
local active = redis.call('ZCARD', OPEN) + redis.call('SCARD', TAKEN)

-- Whether one more group may be admitted, and whether a READY one must be evicted for it: as
-- BufferState._make_room, with the arithmetic of RateLimit in staleness.py and of MemoryQuota in capacity.py.
local function room()
  local by_ratio = math.floor((max_diff + used) / samples_per_insert) - (inserted + inflight)
  if tasks_put <= admitted or not (math.max(min_size, size) > active or by_ratio > 0) then return false end
  if room_bytes > 0 and stored_bytes + (inflight + 1) * group_bytes > room_bytes then return false end
  local full = active >= (staleness + 1) * size
  if max_diff < 1e15 then return not full or redis.call('ZCARD', READY) > 0, full end
  return not full and used + active - used_active < horizon, false
end

local granted, first, possible, full = #leases, admitted, room()
while possible and granted < limit do
  if full then
    local lowest = redis.call('ZRANGE', READY, 0, 0)
    if record_of(lowest[1]).uses > 0 then used_active = used_active - 1 end
    end_as_stale(lowest)
    active = active - 1
  end
  admitted, active, inflight, granted = admitted + 1, active + 1, inflight + 1, granted + 1
  possible, full = room()
end
if admitted > first then lease_new(first, admitted - first) end

if granted == 0 then return wait(now) end
redis.call('SET', grant, table.concat(leases, ','), 'PX', lease_ms)
if #again > limit or possible then wake(WAKE_ADMIT) end
return answer

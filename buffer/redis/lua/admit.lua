#!lua
-- After: books paging records many_records endings leases
-- WAITING -> INFLIGHT, and groups that nobody holds to their next holder. ARGV[2..6]: limit, request, holder, slots,
-- kept_since. Returns {'ok', epoch, lease_ms, seq, attempt, strikes, version, task, partial, ...}, {'wait', ms},
-- {'ended'}, or {'kept', asks} if there is room, but for other servers. The same request gets the same leases again, as
-- far as they still hold.
local limit, now, holder = tonumber(ARGV[2]), now_ms(), ARGV[4]
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
  unhold(seq)
  redis.call('HSET', HOLDERS, seq, record.attempt .. ' ' .. holder)
  redis.call('HINCRBY', HELD, holder, 1)
  local begun = partial and redis.call('ZSCORE', BEGUN, seq) or version
  add(seq, record.attempt, record.strikes, begun, redis.call('GET', payload('task', seq)), partial)
end

-- New groups: WAITING -> INFLIGHT.
local function lease_new(first, count)
  local by_seq, begun, deadlines, groups, holders, tasks = {}, {}, {}, {}, {}, {}
  local record = printed({attempt = 1, strikes = 0, longest = 0, oldest = 0, newest = 0, uses = 0, pins = 0})
  for i = 1, count do
    local seq, odd, even = first + i - 1, 2 * i - 1, 2 * i
    by_seq[odd], begun[odd], deadlines[odd], groups[odd], holders[odd] = seq, version, now + lease_ms, seq, seq
    by_seq[even], begun[even], deadlines[even], groups[even], holders[even] = seq, seq, seq, record, '1 ' .. holder
    tasks[i] = payload('task', seq)
  end
  call_with('ZADD', OPEN, by_seq)
  call_with('ZADD', BEGUN, begun)
  call_with('ZADD', LEASES, deadlines)
  call_with('HSET', GROUPS, groups)
  call_with('HSET', HOLDERS, holders)
  redis.call('HINCRBY', HELD, holder, count)
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
local inflight = redis.call('ZCARD', LEASES)
local active = redis.call('ZCARD', OPEN) + redis.call('SCARD', TAKEN)
local free = math.max(0, (staleness + 1) * size - active)

-- Number of new groups that may be admitted, where READY ones may be evicted for them: as BufferState._room, with the
-- arithmetic of RateLimit in staleness.py and of MemoryQuota in capacity.py.
local function new_room()
  local by_ratio = math.floor((max_diff + used) / samples_per_insert) - (inserted + inflight)
  local most = math.min(tasks_put - admitted, math.max(math.max(min_size, size) - active, by_ratio))
  if room_bytes > 0 then
    most = math.min(most, math.floor((room_bytes - stored_bytes) / math.max(1, group_bytes)) - inflight)
  end
  if max_diff < 1e15 then return math.max(0, math.min(most, free + redis.call('ZCARD', READY))) end
  return math.max(0, math.min(most, free, horizon - (used + active - used_active)))
end

-- Free slots of a server. Groups that it had when it asked may have ended since.
local function now_free(name, wanted, slots)
  return math.max(wanted, slots - (tonumber(redis.call('HGET', HELD, name)) or 0))
end

-- The servers that wait, without this one, and without those that have not asked since `kept_since`.
local function other_servers(kept_since)
  local others, waiting = {}, redis.call('HGETALL', WAITING)
  for i = 1, #waiting, 2 do
    local name, wanted, slots, asked = waiting[i], waiting[i + 1]:match('^(%d+) (%d+) (%d+)$')
    if tonumber(asked) <= kept_since then
      redis.call('HDEL', WAITING, name)
    elseif name ~= holder then
      others[#others + 1] = {free = now_free(name, tonumber(wanted), tonumber(slots)), slots = tonumber(slots)}
    end
  end
  return others
end

-- How many of the groups for which there is room this server gets: as in fair_share.py.
local function fair_share(free_slots, slots, others, room)
  local low, high = 0, math.min(free_slots, room)
  while low < high do
    local count = math.ceil((low + high) / 2)
    local free, before = free_slots - count + 1, 0
    for _, other in ipairs(others) do
      local larger = math.ceil((other.free * slots - free * other.slots) / slots)
      before = before + math.max(0, math.min(other.free, larger))
    end
    if before + count <= room then low = count else high = count - 1 end
  end
  return low
end

local slots = tonumber(ARGV[5])
local room = #again + new_room()
local fair = fair_share(now_free(holder, limit, slots), slots, other_servers(tonumber(ARGV[6])), room)
local share = math.min(limit, fair)
if share == 0 then
  local asks = redis.call('HINCRBY', META, 'asks', 1)
  redis.call('HSET', WAITING, holder, limit .. ' ' .. ARGV[5] .. ' ' .. asks)
  if room == 0 then return wait(now) end
  wake(WAKE_ADMIT)
  return {'kept', asks}
end
redis.call('HDEL', WAITING, holder)

for i = 1, math.min(share, #again) do lease_again(again[i]) end
local new = math.max(0, share - #again)
if new > free then end_as_stale(redis.call('ZRANGE', READY, 0, new - free - 1)) end
if new > 0 then lease_new(admitted, new) end
redis.call('SET', grant, table.concat(leases, ','), 'PX', lease_ms)
if room > share then wake(WAKE_ADMIT) end
return answer

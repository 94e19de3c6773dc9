#!lua
-- WAITING -> INFLIGHT, and groups that nobody holds to their next holder. ARGV[2], ARGV[3]: limit, request.
-- Returns {'ok', epoch, lease_ms, seq, attempt, version, task, partial, ...}, {'wait', ms} or {'ended'}. The
-- same request gets the same leases again, as far as they still hold.
local limit, now, granted = tonumber(ARGV[2]), now_ms(), 0
local grant, dials = payload('grant', ARGV[3]), {}
for i, value in ipairs(redis.call('HMGET', META, 'lease_ms', 'version', 'max_staleness', 'groups_per_step', 'horizon',
    'min_size', 'samples_per_insert', 'max_diff', 'used', 'inserted', 'tasks_put', 'admitted', 'ended', 'epoch')) do
  dials[i] = tonumber(value) or 0
end
local lease_ms, version, staleness, size, horizon, min_size, samples_per_insert, max_diff, used, inserted, tasks_put,
  admitted, ended, epoch = unpack(dials)
local answer, leases = {'ok', epoch, lease_ms}, {}

local function add(seq, attempt, begun, partial)
  for _, value in ipairs({tonumber(seq), tonumber(attempt), tonumber(begun), redis.call('GET', payload('task', seq)),
      partial}) do
    answer[#answer + 1] = value
  end
end

local function lease(seq)
  local before, partial = redis.call('ZSCORE', LEASES, seq), false
  if before then
    partial = redis.call('GET', payload('partial', seq))
    if tonumber(before) > 0 then redis.call('HINCRBY', STRIKES, seq, 1) end
  end
  -- Where nothing is left of earlier attempts it begins anew.
  if not partial then redis.call('ZADD', BEGUN, version, seq) end
  local attempt = redis.call('HINCRBY', ATTEMPTS, seq, 1)
  redis.call('ZADD', LEASES, now + lease_ms, seq)
  leases[#leases + 1] = seq .. ':' .. attempt
  add(seq, attempt, partial and redis.call('ZSCORE', BEGUN, seq) or version, partial)
  granted = granted + 1
end

for seq, attempt in (redis.call('GET', grant) or ''):gmatch('(%d+):(%d+)') do
  if holds(seq, attempt) then
    add(seq, attempt, redis.call('ZSCORE', BEGUN, seq), redis.call('GET', payload('partial', seq)))
  end
end
if #answer > 3 then return answer end
if ended == 1 then
  wake(WAKE_ADMIT) -- the next one who waits
  return {'ended'}
end

local again = unheld(now)
for i = 1, math.min(limit, #again) do lease(again[i]) end

local inflight = redis.call('ZCARD', LEASES)
local active = redis.call('ZCARD', OPEN) + redis.call('SCARD', TAKEN)
local used_groups = redis.call('HLEN', USES)

-- Whether one more group may be admitted, and whether a READY one must be evicted for it: as
-- Ledger._make_room, with the arithmetic of RateLimit in staleness/rate.py.
local function room()
  local by_ratio = math.floor((max_diff + used) / samples_per_insert) - (inserted + inflight)
  if tasks_put <= admitted or not (math.max(min_size, size) > active or by_ratio > 0) then return false end
  local full = active >= (staleness + 1) * size
  if max_diff < 1e15 then return not full or redis.call('ZCARD', READY) > 0, full end
  return not full and used + active - used_groups < horizon, false
end

local possible, full = room()
while possible and granted < limit do
  if full then
    end_as_stale(redis.call('ZRANGE', READY, 0, 0)[1])
    active, used_groups = active - 1, redis.call('HLEN', USES)
  end
  redis.call('ZADD', OPEN, admitted, admitted)
  redis.call('HINCRBY', META, 'admitted', 1)
  lease(admitted)
  admitted, active, inflight = admitted + 1, active + 1, inflight + 1
  possible, full = room()
end

if granted == 0 then return wait(now) end
redis.call('SET', grant, table.concat(leases, ','), 'PX', lease_ms)
if #again > limit or possible then wake(WAKE_ADMIT) end
return answer

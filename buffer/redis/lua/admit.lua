#!lua
-- WAITING -> INFLIGHT, and groups that nobody holds to their next holder. ARGV[2], ARGV[3]: limit, request.
-- Returns {'ok', epoch, lease_ms, seq, attempt, version, ...}, {'wait', ms} or {'ended'}. The same
-- request gets the same leases again, as far as they still hold.
local limit, now, lease_ms = tonumber(ARGV[2]), now_ms(), meta('lease_ms')
local grant, answer, granted = payload('grant', ARGV[3]), {'ok', meta('epoch'), lease_ms}, 0

local function add(seq, attempt)
  for _, value in ipairs({seq, attempt, redis.call('HGET', VERSIONS, seq)}) do
    answer[#answer + 1] = tonumber(value)
  end
end

local function lease(seq)
  local before = redis.call('ZSCORE', LEASES, seq)
  if before and tonumber(before) > 0 then redis.call('HINCRBY', STRIKES, seq, 1) end
  local attempt = redis.call('HINCRBY', ATTEMPTS, seq, 1)
  redis.call('ZADD', LEASES, now + lease_ms, seq)
  redis.call('APPEND', grant, seq .. ':' .. attempt .. ',')
  add(seq, attempt)
  granted = granted + 1
end

for seq, attempt in (redis.call('GET', grant) or ''):gmatch('(%d+):(%d+)') do
  if holds(seq, attempt) then add(seq, attempt) end
end
if #answer > 3 then return answer end
if meta('ended') == 1 then
  wake(WAKE_ADMIT) -- the next one who waits
  return {'ended'}
end

local again = expired(now)
for i = 1, math.min(limit, #again) do lease(again[i]) end

-- As can_admit in staleness/window.py: admitted - discarded = active + trained.
local active = redis.call('ZCARD', OPEN) + redis.call('SCARD', TAKEN)
local trained = tonumber(redis.call('HGET', RELEASED, 'trained')) or 0
local free = (meta('max_staleness') + 1) * meta('groups_per_step') - active
local left = meta('horizon') - (active + trained)
local admitted = meta('admitted')
local possible = math.max(0, math.min(free, left, meta('tasks_put') - admitted))
local fresh = math.min(possible, limit - granted)
for seq = admitted, admitted + fresh - 1 do
  redis.call('HSET', VERSIONS, seq, meta('version'))
  redis.call('ZADD', OPEN, seq, seq)
  redis.call('HINCRBY', META, 'admitted', 1)
  lease(seq)
end

if granted == 0 then return wait(now) end
redis.call('PEXPIRE', grant, lease_ms)
if #again > limit or possible > fresh then wake(WAKE_ADMIT) end
return answer

#!lua
-- WAITING -> INFLIGHT, and groups that nobody holds to their next holder. ARGV[2], ARGV[3]: limit, request.
-- Returns {'ok', epoch, lease_ms, seq, attempt, version, ...}, {'wait', ms} or {'ended'}. The same
-- request gets the same leases again, as far as they still hold.
local limit, now, lease_ms = tonumber(ARGV[2]), now_ms(), meta('lease_ms')
local grant, answer, granted = payload('grant', ARGV[3]), {'ok', meta('epoch'), lease_ms}, 0

local function add(seq, attempt)
  for _, value in ipairs({seq, attempt, redis.call('ZSCORE', BEGUN, seq)}) do
    answer[#answer + 1] = tonumber(value)
  end
end

local function lease(seq)
  local before = redis.call('ZSCORE', LEASES, seq)
  if before and tonumber(before) > 0 then redis.call('HINCRBY', STRIKES, seq, 1) end
  if redis.call('EXISTS', payload('partial', seq)) == 0 then
    redis.call('ZADD', BEGUN, meta('version'), seq) -- nothing is left of earlier attempts
  end
  local attempt = redis.call('HINCRBY', ATTEMPTS, seq, 1)
  redis.call('ZADD', LEASES, now + lease_ms, seq)
  redis.call('APPEND', grant, seq .. ':' .. attempt .. ',')
  add(seq, attempt)
  granted = granted + 1
end

-- As RateLimit in staleness/rate.py: whether uses and inserts depend on each other, and whether one
-- more insert is allowed.
local limits = meta('max_diff') < 1e15

local function insertable(active)
  local size = math.max(meta('min_size'), meta('groups_per_step'))
  local inserts = meta('inserted') + redis.call('ZCARD', LEASES)
  local by_ratio = math.floor((meta('max_diff') + meta('used')) / meta('samples_per_insert')) - inserts
  return size > active or by_ratio > 0
end

-- Whether one more group may be admitted, and whether a READY one must be evicted for it: as
-- Ledger._make_room.
local function room()
  local active = redis.call('ZCARD', OPEN) + redis.call('SCARD', TAKEN)
  local full = active >= (meta('max_staleness') + 1) * meta('groups_per_step')
  if meta('tasks_put') <= meta('admitted') or not insertable(active) then return false end
  if limits then return not full or redis.call('ZCARD', READY) > 0, full end
  local unused = active - redis.call('HLEN', USES)
  return not full and meta('used') + unused < meta('horizon'), false
end

local function admit_one()
  local seq = meta('admitted')
  redis.call('ZADD', OPEN, seq, seq)
  redis.call('HINCRBY', META, 'admitted', 1)
  lease(seq)
end

for seq, attempt in (redis.call('GET', grant) or ''):gmatch('(%d+):(%d+)') do
  if holds(seq, attempt) then add(seq, attempt) end
end
if #answer > 3 then return answer end
if meta('ended') == 1 then
  wake(WAKE_ADMIT) -- the next one who waits
  return {'ended'}
end

local again = unheld(now)
for i = 1, math.min(limit, #again) do lease(again[i]) end
local possible, full = room()
while possible and granted < limit do
  if full then end_as_stale(redis.call('ZRANGE', READY, 0, 0)[1]) end
  admit_one()
  possible, full = room()
end

if granted == 0 then return wait(now) end
redis.call('PEXPIRE', grant, lease_ms)
if #again > limit or possible then wake(WAKE_ADMIT) end
return answer

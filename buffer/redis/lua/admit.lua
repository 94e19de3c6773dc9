-- WAITING -> INFLIGHT, and expired leases to a new holder. ARGV: limit.
-- Returns {'OK', epoch, lease_ms, {seq, attempt, version, partial's attempt or -1}, ...},
-- {'ENDED'}, or {'WAIT', milliseconds until the next lease expires (-1: none), cause}.
if number('ended') == 1 then return {'ENDED'} end
local limit, now, lease = tonumber(ARGV[1]), now_ms(), number('lease_ms')
local tickets = {}

local function lease_out(seq, attempt)
  redis.call('HSET', key('attempt'), seq, attempt)
  redis.call('ZADD', key('inflight'), now + lease, seq)
  local partial = redis.call('HGET', key('partial'), seq) or '-1'
  tickets[#tickets + 1] = {seq, attempt, redis.call('HGET', key('admitted_version'), seq), partial}
end

local expired = redis.call('ZRANGEBYSCORE', key('inflight'), '-inf', now)
table.sort(expired, function(a, b) return tonumber(a) < tonumber(b) end)
for _, seq in ipairs(expired) do
  -- A deadline of 0 is a ticket that was given back: no fault of the group's.
  local died = tonumber(redis.call('ZSCORE', key('inflight'), seq)) > 0
  local strikes = tonumber(redis.call('HGET', key('strikes'), seq) or '0') + (died and 1 or 0)
  if strikes >= number('max_attempts') then
    discard(seq, 'failed')
  elseif #tickets < limit then
    redis.call('HSET', key('strikes'), seq, strikes)
    lease_out(seq, tonumber(redis.call('HGET', key('attempt'), seq)) + 1)
  end
end

while #tickets < limit and room() > 0 do
  local seq = redis.call('HINCRBY', meta_key, 'admitted', 1) - 1
  redis.call('HSET', key('admitted_version'), seq, number('version'))
  redis.call('ZADD', key('order'), seq, seq)
  lease_out(seq, 1)
end

if #tickets > 0 then
  if room() > 0 then wake('admit') end -- the next one who waits
  return {'OK', number('epoch'), lease, unpack(tickets)}
end
local next_lease = redis.call('ZRANGE', key('inflight'), 0, 0, 'WITHSCORES')
local cause = number('tasks_put') > number('admitted') and 'the staleness window' or 'tasks'
return {'WAIT', next_lease[2] and math.max(1, next_lease[2] - now) or -1, cause}

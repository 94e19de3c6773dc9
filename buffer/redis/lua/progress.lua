-- The partial of this attempt is stored: make it the one that a next holder gets. ARGV: seq, attempt.
local seq, attempt = ARGV[1], ARGV[2]
if not holds(seq, attempt) or not redis.call('ZSCORE', key('inflight'), seq) then
  redis.call('UNLINK', key('partial:' .. seq .. ':' .. attempt))
  return 'LOST'
end
local before = redis.call('HGET', key('partial'), seq)
if before and before ~= attempt then redis.call('UNLINK', key('partial:' .. seq .. ':' .. before)) end
redis.call('HSET', key('partial'), seq, attempt)
redis.call('ZADD', key('inflight'), now_ms() + number('lease_ms'), seq)
return 'OK'

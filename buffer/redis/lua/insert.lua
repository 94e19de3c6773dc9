-- INFLIGHT -> READY. ARGV: seq, attempt, version of the oldest token.
local seq, attempt = ARGV[1], ARGV[2]
if not holds(seq, attempt) then
  redis.call('UNLINK', key('group:' .. seq .. ':' .. attempt))
  return 'LOST'
end
if redis.call('ZREM', key('inflight'), seq) == 1 then
  redis.call('ZADD', key('ready'), seq, seq)
  redis.call('HSET', key('oldest'), seq, ARGV[3])
  local partial = redis.call('HGET', key('partial'), seq)
  if partial then
    redis.call('UNLINK', key('partial:' .. seq .. ':' .. partial))
    redis.call('HDEL', key('partial'), seq)
  end
  wake('take')
end
return 'OK' -- also for a repetition: the group is READY or beyond

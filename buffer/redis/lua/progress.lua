#!lua flags=allow-oom
-- Keep the staged partial and renew the lease. ARGV[2..5]: seq, attempt, version of the oldest token
-- (0 if there is none), tokens of the longest completion.
if not holds(ARGV[2], ARGV[3]) then
  redis.call('UNLINK', STAGE)
  return {'lost'}
end
redis.call('RENAME', STAGE, payload('partial', ARGV[2]))
redis.call('ZADD', LEASES, now_ms() + meta('lease_ms'), ARGV[2])
redis.call('ZADD', BEGUN, 'GT', ARGV[4], ARGV[2])
redis.call('HSET', LONGEST, ARGV[2], ARGV[5])
return {'ok'}

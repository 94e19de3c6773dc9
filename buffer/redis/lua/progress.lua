#!lua flags=allow-oom
-- Keep the staged partial and renew the lease. ARGV[2], ARGV[3]: seq, attempt.
if not holds(ARGV[2], ARGV[3]) then
  redis.call('UNLINK', STAGE)
  return {'lost'}
end
redis.call('RENAME', STAGE, payload('partial', ARGV[2]))
redis.call('ZADD', LEASES, now_ms() + meta('lease_ms'), ARGV[2])
return {'ok'}

#!lua flags=allow-oom
-- After: books records
-- Keep the staged partial and renew the lease. ARGV[2..5]: seq, attempt, version of the oldest token
-- (0 if there is none), tokens of the longest completion.
local record = held(ARGV[2], ARGV[3])
if not record then
  redis.call('UNLINK', STAGE)
  return {'lost'}
end
redis.call('RENAME', STAGE, payload('partial', ARGV[2]))
redis.call('ZADD', LEASES, now_ms() + meta('lease_ms'), ARGV[2])
redis.call('ZADD', BEGUN, 'GT', ARGV[4], ARGV[2])
record.longest = tonumber(ARGV[5])
redis.call('HSET', GROUPS, ARGV[2], printed(record))
return {'ok'}

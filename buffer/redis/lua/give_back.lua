#!lua flags=allow-oom
-- After: books records
-- End a lease now: nobody holds the group until the next admit. ARGV[2..4]: seq, attempt, strikes to add (0 or 1).
-- A repetition finds the lease ended, so it adds no second strike.
local record = held(ARGV[2], ARGV[3])
if record then
  record.strikes = record.strikes + tonumber(ARGV[4])
  redis.call('HSET', GROUPS, ARGV[2], printed(record))
  redis.call('ZADD', LEASES, 0, ARGV[2])
  unhold(ARGV[2])
  wake(WAKE_ADMIT)
end
return {'ok'}

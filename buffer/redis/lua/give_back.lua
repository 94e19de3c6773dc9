#!lua flags=allow-oom
-- After: books records
-- End a lease now: nobody holds the group until the next admit. ARGV[2], ARGV[3]: seq, attempt.
if held(ARGV[2], ARGV[3]) then
  redis.call('ZADD', LEASES, 0, ARGV[2])
  wake(WAKE_ADMIT)
end
return {'ok'}

#!lua flags=allow-oom
-- After: books paging records many_records policy
-- Retune a live run. ARGV[2..]: the policy.
write_policy(2)
wake(WAKE_ADMIT)
wake(WAKE_TAKE)
return {'ok'}

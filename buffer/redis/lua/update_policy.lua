#!lua flags=allow-oom
-- Requires: state pages records record_lists policy
-- Replace the policy of a live run. ARGV[2..]: the policy.
write_policy(2)
wake_waiter(WAKE_ADMIT)
wake_waiter(WAKE_TAKE)
return {'ok'}

#!lua flags=allow-oom
-- Requires: state
-- End the run. Each process that wakes finds that it has ended, and wakes the next one.
redis.call('HSET', META, 'ended', 1)
wake_waiter(WAKE_ADMIT)
wake_waiter(WAKE_TAKE)
return {'ok'}

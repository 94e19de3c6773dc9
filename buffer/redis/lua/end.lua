#!lua flags=allow-oom
-- After: books
-- The run is over; whoever wakes finds out, and wakes the next.
redis.call('HSET', META, 'ended', 1)
wake(WAKE_ADMIT)
wake(WAKE_TAKE)
return {'ok'}

#!lua flags=allow-oom
-- Write a value, because WAIT counts replicas up to the last write of its connection, and a repeated transition writes
-- nothing. KEYS: the barrier.
redis.call('INCR', KEYS[1])

#!lua flags=allow-oom
-- Retune a live run. ARGV[2..4]: S, P, horizon.
redis.call('HSET', META, 'max_staleness', ARGV[2], 'groups_per_step', ARGV[3], 'horizon', ARGV[4])
wake(WAKE_ADMIT)
wake(WAKE_TAKE)
return {'ok'}

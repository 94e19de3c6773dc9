#!lua flags=allow-oom
-- Attach to the run, or begin it. ARGV[2..6]: S, P, horizon, lease_ms, max_attempts. Written only
-- where they differ from those of the last time, so that a process that joins undoes no retuning.
local configured = table.concat(ARGV, ' ', 2, 6)
if redis.call('HGET', META, 'configured') == configured then return {'ok'} end
if tonumber(ARGV[4]) > meta('horizon') then redis.call('HSET', META, 'ended', 0) end
redis.call('HSET', META, 'format', 1, 'configured', configured, 'max_staleness', ARGV[2],
  'groups_per_step', ARGV[3], 'horizon', ARGV[4], 'lease_ms', ARGV[5], 'max_attempts', ARGV[6])
wake(WAKE_ADMIT)
wake(WAKE_TAKE)
return {'ok'}

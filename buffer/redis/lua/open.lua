#!lua flags=allow-oom
-- After: books paging records many_records policy
-- Attach to the run, or begin it. ARGV[2..]: the policy, the quota, lease_ms, max_attempts. Written only where they
-- differ from those of the last time, so that a process that joins undoes no retuning.
local stored = dial('format')
if stored and tonumber(stored) ~= FORMAT then return {'format', tonumber(stored), FORMAT} end
local configured = table.concat(ARGV, ' ', 2)
if dial('configured') == configured then return {'ok'} end
local horizon_before = meta('horizon')
write_policy(2)
if meta('horizon') > horizon_before then redis.call('HSET', META, 'ended', 0) end
redis.call('HSET', META, 'format', FORMAT, 'configured', configured, 'reserved_bytes', ARGV[#ARGV - 4],
  'room_bytes', ARGV[#ARGV - 3], 'group_bytes', ARGV[#ARGV - 2], 'lease_ms', ARGV[#ARGV - 1],
  'max_attempts', ARGV[#ARGV])
wake(WAKE_ADMIT)
wake(WAKE_TAKE)
return {'ok'}

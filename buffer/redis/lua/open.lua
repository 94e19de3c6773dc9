#!lua flags=allow-oom
-- Requires: state pages records record_lists policy
-- Start the run, or attach to it. ARGV[2..]: the policy, then reserved_bytes, room_bytes, group_bytes, lease_ms and
-- max_attempts. Returns {'ok'} or {'format', stored, own}.
local stored_format = meta_text('format')
if stored_format and tonumber(stored_format) ~= FORMAT then return {'format', tonumber(stored_format), FORMAT} end

-- Write the policy only if the configuration has changed: a joining process must not overwrite a live change.
local configured = table.concat(ARGV, ' ', 2)
if meta_text('configured') == configured then return {'ok'} end

local horizon_before = meta_number('horizon')
write_policy(2)
-- With more steps than before, a run that has ended continues.
if meta_number('horizon') > horizon_before then redis.call('HSET', META, 'ended', 0) end
redis.call('HSET', META,
  'format', FORMAT,
  'configured', configured,
  'reserved_bytes', ARGV[#ARGV - 4],
  'room_bytes', ARGV[#ARGV - 3],
  'group_bytes', ARGV[#ARGV - 2],
  'lease_ms', ARGV[#ARGV - 1],
  'max_attempts', ARGV[#ARGV])
wake_waiter(WAKE_ADMIT)
wake_waiter(WAKE_TAKE)
return {'ok'}

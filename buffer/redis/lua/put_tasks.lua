#!lua
-- Requires: state
-- Append tasks. The same transaction has SET their payloads, where there were none. ARGV[2], ARGV[3]: first, count.
-- Returns {'ok', next} or {'gap', next}, with the index of the next task.
local first = tonumber(ARGV[2])
local last = first + ARGV[3] - 1
local next_index = meta_number('tasks_put')
local admitted = meta_number('admitted')
local is_gap = first > next_index

-- Delete the payloads that are not needed: those beyond a gap, and those of groups that are finished, which SET has
-- created again.
for index = first, last do
  local is_finished = index < admitted and not redis.call('ZSCORE', LEASES, index)
  if is_gap or is_finished then redis.call('UNLINK', payload_key('task', index)) end
end
if is_gap then return {'gap', next_index} end

if last >= next_index then
  next_index = last + 1
  redis.call('HSET', META, 'tasks_put', next_index)
  wake_waiter(WAKE_ADMIT)
end
return {'ok', next_index}

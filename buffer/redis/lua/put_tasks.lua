#!lua
-- After: books
-- Append tasks that this transaction has SET (where they were not there). ARGV[2], ARGV[3]: first, count.
-- Payloads that are not wanted (beyond a gap, or of groups that have gone on) are removed again.
local first, put, admitted = tonumber(ARGV[2]), meta('tasks_put'), meta('admitted')
local last = first + ARGV[3] - 1
for index = first, last do
  local gone = index < admitted and not redis.call('ZSCORE', LEASES, index)
  if first > put or gone then redis.call('UNLINK', payload('task', index)) end
end
if first > put then return {'gap', put} end
if last >= put then
  put = last + 1
  redis.call('HSET', META, 'tasks_put', put)
  wake(WAKE_ADMIT)
end
return {'ok', put}

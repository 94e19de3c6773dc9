-- Append to the stream. ARGV: first index, count. The payloads are there already; what the stream has is kept.
local first, count, put = tonumber(ARGV[1]), tonumber(ARGV[2]), number('tasks_put')
if first > put then return {'GAP', put} end
if first + count > put then
  redis.call('HSET', meta_key, 'tasks_put', first + count)
  wake('admit')
end
return {'OK', number('tasks_put')}

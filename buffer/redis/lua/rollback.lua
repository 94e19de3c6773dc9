-- A trainer takes over at ARGV[1]. What older epochs took for steps from there on is delivered again.
local epoch, version = redis.call('HINCRBY', meta_key, 'epoch', 1), number('version')
if tonumber(ARGV[1]) * number('groups_per_step') < number('horizon') then redis.call('HSET', meta_key, 'ended', 0) end
wake('take')
return {epoch, version}

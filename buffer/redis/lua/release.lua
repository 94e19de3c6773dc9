-- TAKEN -> RELEASED(trained), once a group; payloads stay until the checkpoint. ARGV: epoch, version.
if fenced(ARGV[1]) then return {'FENCED', number('epoch')} end
local logged, epoch, count = redis.call('HGET', key('log'), ARGV[2]), nil, 0
for part in string.gmatch(logged or '', '%d+') do
  if epoch then count = count + redis.call('ZREM', key('taken'), part) else epoch = part end
end
if count > 0 then
  redis.call('HINCRBY', meta_key, 'released:trained', count)
  redis.call('HINCRBY', meta_key, 'released', count)
  wake('admit')
end
return {'OK', count}

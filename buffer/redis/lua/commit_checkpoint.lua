#!lua flags=allow-oom
-- Forget the steps before `version`, and their payloads. ARGV[2], ARGV[3]: epoch, version.
if fenced(ARGV[2]) then return {'fenced', meta('epoch')} end
for _, version in ipairs(steps_below(ARGV[3])) do
  for _, seq in ipairs(settle(version)) do forget_payloads(seq) end
  redis.call('HDEL', LOG, version)
end
redis.call('HSET', META, 'committed', math.max(meta('committed'), tonumber(ARGV[3])))
return {'ok'}

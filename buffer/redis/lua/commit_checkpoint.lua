-- Forget the steps before `version`. ARGV: epoch, version.
if fenced(ARGV[1]) then return {'FENCED', number('epoch')} end
for _, version in ipairs(redis.call('HKEYS', key('log'))) do
  if tonumber(version) < tonumber(ARGV[2]) then
    local epoch = nil
    for part in string.gmatch(redis.call('HGET', key('log'), version), '%d+') do
      if epoch then forget_payloads(part) else epoch = part end
    end
    redis.call('HDEL', key('log'), version)
  end
end
return {'OK', 0}

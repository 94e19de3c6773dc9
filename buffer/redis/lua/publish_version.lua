-- The newest policy version; it never goes back. ARGV: epoch, version.
if fenced(ARGV[1]) then return {'FENCED', number('epoch')} end
if tonumber(ARGV[2]) > number('version') then redis.call('HSET', meta_key, 'version', ARGV[2]) end
return {'OK', number('version')}

#!lua flags=allow-oom
-- After: books
-- Raise the head version; it never goes back. ARGV[2], ARGV[3]: epoch, version.
if fenced(ARGV[2]) then return {'fenced', meta('epoch')} end
redis.call('HSET', META, 'version', math.max(meta('version'), tonumber(ARGV[3])))
return {'ok'}

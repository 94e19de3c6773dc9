#!lua flags=allow-oom
-- Requires: state
-- Raise the newest version; it never decreases. ARGV[2], ARGV[3]: epoch, version.
if is_fenced(ARGV[2]) then return {'fenced', meta_number('epoch')} end
redis.call('HSET', META, 'version', math.max(meta_number('version'), tonumber(ARGV[3])))
return {'ok'}

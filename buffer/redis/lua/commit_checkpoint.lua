#!lua flags=allow-oom
-- After: books paging records many_records endings log settle
-- Forget the steps before `version`, and their payloads. ARGV[2], ARGV[3]: epoch, version.
if fenced(ARGV[2]) then return {'fenced', meta('epoch')} end
for _, past in ipairs(steps_below(ARGV[3])) do
  settle(past)
  local seqs = logged(past).seqs
  unpin(seqs, records_of(seqs))
  redis.call('HDEL', LOG, past)
end
redis.call('HSET', META, 'committed', math.max(meta('committed'), tonumber(ARGV[3])))
return {'ok'}

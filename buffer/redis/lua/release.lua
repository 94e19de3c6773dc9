#!lua flags=allow-oom
-- After: books paging records many_records endings log settle
-- TAKEN -> RELEASED(trained) for the batch of a step. ARGV[2], ARGV[3]: epoch, version.
if fenced(ARGV[2]) then return {'fenced', meta('epoch')} end
settle(ARGV[3])
return {'ok'}

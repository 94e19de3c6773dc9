#!lua flags=allow-oom
-- After: books paging records many_records endings
-- READY -> RELEASED for every group, as if it had grown too old. Returns how many.
local seqs = redis.call('ZRANGE', READY, 0, -1)
end_as_stale(seqs)
return {'ok', #seqs}

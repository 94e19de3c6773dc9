#!lua flags=allow-oom
-- Requires: state pages records record_lists endings
-- READY -> RELEASED for every group, as if it were too old. Returns {'ok', count}.
local seqs = redis.call('ZRANGE', READY, 0, -1)
end_as_stale(seqs)
return {'ok', #seqs}

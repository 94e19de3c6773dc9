#!lua flags=allow-oom
-- READY -> RELEASED for every group, as if it had grown too old. Returns how many.
local seqs = redis.call('ZRANGE', READY, 0, -1)
for _, seq in ipairs(seqs) do end_as_stale(seq) end
return {'ok', #seqs}

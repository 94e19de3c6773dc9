-- INFLIGHT -> RELEASED(reason). ARGV: seq, attempt, reason.
local seq, attempt, note = ARGV[1], ARGV[2], key('discarded:' .. ARGV[1] .. ':' .. ARGV[2])
if redis.call('EXISTS', note) == 1 then return 'OK' end -- a repetition
if not holds(seq, attempt) or not redis.call('ZSCORE', key('inflight'), seq) then return 'LOST' end
discard(seq, ARGV[3])
redis.call('SET', note, 1, 'EX', 3600)
return 'OK'

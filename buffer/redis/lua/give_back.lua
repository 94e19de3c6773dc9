-- End a lease now. ARGV: seq, attempt.
local seq, attempt = ARGV[1], ARGV[2]
if holds(seq, attempt) and redis.call('ZSCORE', key('inflight'), seq) then
  redis.call('ZADD', key('inflight'), 0, seq)
  wake('admit')
end
return 'OK'

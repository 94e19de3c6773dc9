-- Renew leases. ARGV: seq, attempt, ... Returns the sequences that are no longer this holder's.
local deadline, lost = now_ms() + number('lease_ms'), {}
for i = 1, #ARGV, 2 do
  local seq, attempt = ARGV[i], ARGV[i + 1]
  if holds(seq, attempt) and redis.call('ZSCORE', key('inflight'), seq) then
    redis.call('ZADD', key('inflight'), deadline, seq)
  else
    lost[#lost + 1] = seq
  end
end
return lost

#!lua flags=allow-oom
-- Requires: state records
-- Renew leases. ARGV[2..]: seq, attempt, ... Returns the sequences whose lease is lost.
local lost = {}
local deadline = now_ms() + meta_number('lease_ms')
for i = 2, #ARGV, 2 do
  local seq = ARGV[i]
  if read_leased_record(seq, ARGV[i + 1]) then
    redis.call('ZADD', LEASES, deadline, seq)
  else
    lost[#lost + 1] = tonumber(seq)
  end
end
return lost

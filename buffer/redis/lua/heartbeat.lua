#!lua flags=allow-oom
-- After: books records
-- Renew leases. ARGV[2..]: seq, attempt, ... Returns the sequences that are not this holder's.
local lost, deadline = {}, now_ms() + meta('lease_ms')
for i = 2, #ARGV, 2 do
  if held(ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', LEASES, deadline, ARGV[i])
  else
    lost[#lost + 1] = tonumber(ARGV[i])
  end
end
return lost

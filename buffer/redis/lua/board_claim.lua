#!lua flags=allow-oom
-- Claim a job, or renew the claim. KEYS: the claim. ARGV: holder, ttl in ms. Returns 1 if this holder now has it.
local current_holder = redis.call('GET', KEYS[1])
if current_holder and current_holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1

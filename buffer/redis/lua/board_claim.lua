#!lua flags=allow-oom
-- KEYS: the claim. ARGV: holder, ttl in ms. Returns 1 if the claim is this holder's now.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1

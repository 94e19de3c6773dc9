#!lua flags=allow-oom
-- Store a fact of the trainer. An older epoch never replaces a newer one.
-- KEYS: the fact, its epoch. ARGV: epoch, value.
local stored_epoch = tonumber(redis.call('GET', KEYS[2])) or 0
if tonumber(ARGV[1]) >= stored_epoch then
  redis.call('SET', KEYS[1], ARGV[2])
  redis.call('SET', KEYS[2], ARGV[1])
end

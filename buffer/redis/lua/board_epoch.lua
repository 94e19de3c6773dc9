#!lua flags=allow-oom
-- KEYS: a fact of the trainer, its epoch. ARGV: epoch, value. An older epoch never replaces a newer one.
if tonumber(ARGV[1]) >= (tonumber(redis.call('GET', KEYS[2])) or 0) then
  redis.call('SET', KEYS[1], ARGV[2])
  redis.call('SET', KEYS[2], ARGV[1])
end

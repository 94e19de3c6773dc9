#!lua flags=allow-oom
-- Store the staged probe unless there is a newer one. KEYS: stage, probe, its version, wake list. ARGV: version.
local stored_version = tonumber(redis.call('GET', KEYS[3])) or 0
if tonumber(ARGV[1]) < stored_version then
  redis.call('UNLINK', KEYS[1])
  return
end
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('SET', KEYS[3], ARGV[1])
if redis.call('LLEN', KEYS[4]) == 0 then redis.call('RPUSH', KEYS[4], 1) end

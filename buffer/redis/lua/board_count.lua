#!lua flags=allow-oom
-- KEYS: counters, this request. ARGV: name, amount, ms to remember the request. Adds once a request.
if redis.call('SET', KEYS[2], 1, 'NX', 'PX', ARGV[3]) then
  redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])
end

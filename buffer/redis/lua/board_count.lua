#!lua flags=allow-oom
-- Add to a counter, once per request. KEYS: counters, this request. ARGV: name, amount, ms to remember the request.
if redis.call('SET', KEYS[2], 1, 'NX', 'PX', ARGV[3]) then
  redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])
end

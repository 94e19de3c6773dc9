-- The format of the books. Another release may read them differently.
local FORMAT = 4

-- ReplayPolicy, from ARGV[first] on.
local function write_policy(first)
  local on_stale_before = dial('on_stale')
  for i, name in ipairs({'max_staleness', 'groups_per_step', 'horizon', 'selector', 'selector_window', 'on_stale',
      'min_size', 'samples_per_insert', 'min_diff', 'max_diff', 'max_uses', 'seed', 'staleness'}) do
    redis.call('HSET', META, name, ARGV[first + i - 1])
  end
  local on_stale = dial('on_stale')
  if on_stale == on_stale_before then return end
  local ready = redis.call('ZRANGE', READY, 0, -1)
  for i, record in ipairs(records_of(ready)) do redis.call('ZADD', AGES, age_of(record, on_stale), ready[i]) end
end

-- Defines FORMAT, write_policy.

-- Format of the state keys. Increment it if another release would misread them.
local FORMAT = 4

local POLICY_FIELDS = {
  'max_staleness',
  'groups_per_step',
  'horizon',
  'selector',
  'selector_window',
  'on_stale',
  'min_size',
  'samples_per_insert',
  'min_diff',
  'max_diff',
  'max_uses',
  'seed',
  'staleness',
}

-- Write the fields of ReplayPolicy, which start at ARGV[first].
local function write_policy(first)
  local on_stale_before = meta_text('on_stale')
  for i, name in ipairs(POLICY_FIELDS) do
    redis.call('HSET', META, name, ARGV[first + i - 1])
  end

  -- The scores in AGES depend on on_stale, so write them again if it has changed.
  local on_stale = meta_text('on_stale')
  if on_stale == on_stale_before then return end
  local ready = redis.call('ZRANGE', READY, 0, -1)
  for i, record in ipairs(read_records(ready)) do
    redis.call('ZADD', AGES, version_for_age(record, on_stale), ready[i])
  end
end

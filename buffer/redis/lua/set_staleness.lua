#!lua flags=allow-oom
-- Requires: state
-- Set the effective S of admission, bounded as by ReplayPolicy.with_staleness. ARGV[2], ARGV[3]: epoch, S.
if is_fenced(ARGV[2]) then return {'fenced', meta_number('epoch')} end
local max_staleness = meta_number('max_staleness')
local needs_whole_window = meta_text('selector') == 'exact_age' or meta_number('max_diff') < 1e15
local smallest = max_staleness
if not needs_whole_window then
  local min_capacity = math.max(1, meta_number('selector_window'), meta_number('min_size'))
  smallest = math.ceil(min_capacity / meta_number('groups_per_step')) - 1
end
redis.call('HSET', META, 'staleness', math.max(smallest, math.min(tonumber(ARGV[3]), max_staleness)))
wake_waiter(WAKE_ADMIT)
return {'ok'}

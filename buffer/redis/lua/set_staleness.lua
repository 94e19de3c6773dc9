#!lua flags=allow-oom
-- After: books
-- Change the effective S of admission. ARGV[2], ARGV[3]: epoch, S, which is kept within the bounds of
-- ReplayPolicy.with_staleness.
if fenced(ARGV[2]) then return {'fenced', meta('epoch')} end
local whole = dial('selector') == 'exact_age' or meta('max_diff') < 1e15
local room = math.max(1, meta('selector_window'), meta('min_size'))
local least = whole and meta('max_staleness') or math.ceil(room / meta('groups_per_step')) - 1
redis.call('HSET', META, 'staleness', math.max(least, math.min(tonumber(ARGV[3]), meta('max_staleness'))))
wake(WAKE_ADMIT)
return {'ok'}

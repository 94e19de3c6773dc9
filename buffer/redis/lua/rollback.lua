#!lua flags=allow-oom
-- After: books paging records many_records endings log settle
-- A trainer takes over at `version` (ARGV[2]). What its checkpoint contains is trained, even if the
-- last trainer died before it said so; the later steps stay in the log to be delivered again.
local version = tonumber(ARGV[2])
if version < meta('committed') then return {'forgotten', meta('committed')} end
for _, past in ipairs(steps_below(version)) do settle(past) end
if version * meta('groups_per_step') < meta('horizon') then redis.call('HSET', META, 'ended', 0) end
redis.call('HSET', META, 'version', math.max(meta('version'), version))
wake(WAKE_TAKE)
return {'ok', redis.call('HINCRBY', META, 'epoch', 1), meta('version')}

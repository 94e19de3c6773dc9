#!lua flags=allow-oom
-- After: books paging records many_records endings log settle
-- A trainer takes over at `version` (ARGV[2]). What its checkpoint contains is trained, even if the
-- last trainer died before it said so; the later steps stay in the log to be delivered again.
-- ARGV[3]: request. A repetition, also one that comes late, begins no other epoch: that would fence the trainer that
-- has begun already. ARGV[4]: 'accept_loss' to start generation again at a version whose steps are deleted.
local version, request, REMEMBERED_MS = tonumber(ARGV[2]), payload('rollback', ARGV[3]), 3600 * 1000
local lost = 0

-- As _restart_at in state.py. A group ends before the steps that have it are forgotten, so that its record is still there.
local function restart()
  for _, seq in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do release_unfinished(seq, 'expired', nil) end
  end_as_stale(redis.call('ZRANGE', READY, 0, -1))
  local taken = redis.call('SMEMBERS', TAKEN)
  release_finished(taken, records_of(taken), 'stale')
  local used = lost * meta('groups_per_step')
  for _, later in ipairs(redis.call('HKEYS', LOG)) do
    local seqs = logged(later).seqs
    used = used + #seqs
    unpin(seqs, records_of(seqs))
    redis.call('HDEL', LOG, later)
  end
  used = redis.call('HINCRBY', META, 'used', -used)
  if meta('max_diff') < 1e15 then
    redis.call('HSET', META, 'inserted', math.floor(used / meta('samples_per_insert') + 0.5))
  end
  redis.call('HSET', META, 'committed', version, 'version', version)
end

local begun = redis.call('GET', request)
if begun then
  local epoch, lost_before = begun:match('^(%d+) (%d+)$')
  return {'ok', tonumber(epoch), meta('version'), tonumber(lost_before)}
end
if version < meta('committed') then
  lost = meta('committed') - version
  if ARGV[4] ~= 'accept_loss' then return {'forgotten', meta('committed')} end
  restart()
end
for _, past in ipairs(steps_below(version)) do settle(past) end
if version * meta('groups_per_step') < meta('horizon') then redis.call('HSET', META, 'ended', 0) end
redis.call('HSET', META, 'version', math.max(meta('version'), version))
wake(WAKE_TAKE)
wake(WAKE_ADMIT)
local epoch = redis.call('HINCRBY', META, 'epoch', 1)
redis.call('SET', request, epoch .. ' ' .. lost, 'PX', REMEMBERED_MS)
return {'ok', epoch, meta('version'), lost}

#!lua flags=allow-oom
-- Requires: state pages records record_lists endings steps trained_steps
-- A trainer takes over at `version`. ARGV[2..4]: version, request, 'accept_loss' to restart generation at a version
-- whose steps are deleted. Returns {'ok', epoch, head_version, lost_steps} or {'forgotten', committed}.
local version = tonumber(ARGV[2])
local request_key = payload_key('rollback', ARGV[3])
local REMEMBERED_MS = 3600 * 1000

-- BufferState._restart_at in state.py. Groups end before the steps are deleted, while their records still exist.
local function restart_generation(lost_steps)
  for _, seq in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
    release_unfinished(seq, 'expired', nil)
  end
  end_as_stale(redis.call('ZRANGE', READY, 0, -1))
  local taken = redis.call('SMEMBERS', TAKEN)
  release_finished(taken, read_records(taken), 'stale')

  -- Count as if the lost steps had never been taken.
  local lost_uses = lost_steps * meta_number('groups_per_step')
  for _, step_version in ipairs(redis.call('HKEYS', LOG)) do
    local seqs = read_step(step_version).seqs
    lost_uses = lost_uses + #seqs
    drop_references(seqs, read_records(seqs))
    redis.call('HDEL', LOG, step_version)
  end
  local used = redis.call('HINCRBY', META, 'used', -lost_uses)
  -- With a limited ratio, the inserts have to follow: otherwise nothing would be admitted until the uses catch up.
  if meta_number('max_diff') < 1e15 then
    redis.call('HSET', META, 'inserted', math.floor(used / meta_number('samples_per_insert') + 0.5))
  end
  redis.call('HSET', META, 'committed', version, 'version', version)
end

-- A repetition, even a late one, must not start another epoch: that would fence the trainer that has already started.
local earlier = redis.call('GET', request_key)
if earlier then
  local epoch, lost_steps = earlier:match('^(%d+) (%d+)$')
  return {'ok', tonumber(epoch), meta_number('version'), tonumber(lost_steps)}
end

local lost_steps = 0
local committed = meta_number('committed')
if version < committed then
  if ARGV[4] ~= 'accept_loss' then return {'forgotten', committed} end
  lost_steps = committed - version
  restart_generation(lost_steps)
end

-- The checkpoint contains these steps, even if the last trainer died before it released them. Later steps stay in the
-- log and are delivered again.
for _, step_version in ipairs(steps_below(version)) do
  mark_step_trained(step_version)
end
if version * meta_number('groups_per_step') < meta_number('horizon') then redis.call('HSET', META, 'ended', 0) end
redis.call('HSET', META, 'version', math.max(meta_number('version'), version))
wake_waiter(WAKE_TAKE)
wake_waiter(WAKE_ADMIT)

local epoch = redis.call('HINCRBY', META, 'epoch', 1)
redis.call('SET', request_key, epoch .. ' ' .. lost_steps, 'PX', REMEMBERED_MS)
return {'ok', epoch, meta_number('version'), lost_steps}

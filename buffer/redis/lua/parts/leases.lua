-- Defines reclaim_expired_leases, wait_reply.

-- True if the group has a partial that is too old to continue: too_old_to_finish in selection.py.
local function has_outdated_partial(seq)
  return meta_text('on_stale') == 'drop'
    and meta_number('version') - redis.call('ZSCORE', BEGUN, seq) > meta_number('max_staleness')
    and redis.call('EXISTS', payload_key('partial', seq)) == 1
end

-- Return the sequences that can be leased again, lowest first. Groups without attempts left end as failed, those with
-- an outdated partial as expired.
local function reclaim_expired_leases(now)
  local available = {}
  local max_attempts = meta_number('max_attempts')
  local deadlines = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'WITHSCORES')
  for i = 1, #deadlines, 2 do
    local seq = deadlines[i]
    local expired_leases = read_record(seq).expired_leases
    -- An expired lease is counted only when the group is leased again. One that was given back (deadline 0) has been
    -- counted by give_back, if it counts.
    if tonumber(deadlines[i + 1]) > 0 then expired_leases = expired_leases + 1 end
    if expired_leases >= max_attempts then
      release_unfinished(seq, 'failed', nil)
      wake_trainer_if_ready()
    elseif has_outdated_partial(seq) then
      release_unfinished(seq, 'expired', nil)
      wake_trainer_if_ready()
    else
      available[#available + 1] = seq
    end
  end
  table.sort(available, function(a, b) return tonumber(a) < tonumber(b) end)
  return available
end

-- {'wait', ms until the next lease expires, or -1 if none is running}
local function wait_reply(now)
  local after_now = '(' .. string.format('%.0f', now)
  local next_lease = redis.call('ZRANGEBYSCORE', LEASES, after_now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  local deadline = next_lease[2]
  if not deadline then return {'wait', -1} end
  return {'wait', deadline - now}
end

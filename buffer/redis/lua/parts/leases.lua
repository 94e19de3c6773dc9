-- The partial of a group that nobody holds, too old to go on with (too_old_to_finish in selection.py).
local function outdated(seq)
  return dial('on_stale') == 'drop'
    and meta('version') - redis.call('ZSCORE', BEGUN, seq) > meta('max_staleness')
    and redis.call('EXISTS', payload('partial', seq)) == 1
end

-- Sequences that nobody holds, lowest first. Those that have no attempt left end as failed (a lease that was given
-- back, deadline 0, has its strike already if it is one), those with an outdated partial as expired.
local function unheld(now)
  local again, limit = {}, meta('max_attempts')
  local over = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'WITHSCORES')
  for i = 1, #over, 2 do
    local seq, struck = over[i], tonumber(over[i + 1]) > 0 and 1 or 0
    local failed = record_of(seq).strikes + struck >= limit
    if failed or outdated(seq) then
      release_unfinished(seq, failed and 'failed' or 'expired', nil)
      wake_take_if_ready()
    else
      again[#again + 1] = seq
    end
  end
  table.sort(again, function(a, b) return tonumber(a) < tonumber(b) end)
  return again
end

-- {'wait', ms until the next lease expires, or -1}
local function wait(now)
  local after = '(' .. string.format('%.0f', now)
  local next_lease = redis.call('ZRANGEBYSCORE', LEASES, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return {'wait', next_lease[2] and next_lease[2] - now or -1}
end

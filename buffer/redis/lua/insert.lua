#!lua flags=allow-oom
-- INFLIGHT -> READY with the staged payload. ARGV[2..6]: seq, attempt, versions of the oldest and of the
-- newest token, tokens of the longest completion.
local seq, attempt = ARGV[2], ARGV[3]
if holds(seq, attempt) then
  redis.call('RENAME', STAGE, payload('group', seq))
  pin(seq)
  redis.call('UNLINK', payload('task', seq), payload('partial', seq))
  redis.call('ZREM', LEASES, seq)
  redis.call('ZREM', BEGUN, seq)
  redis.call('HDEL', STRIKES, seq)
  redis.call('HSET', VERSIONS, seq, ARGV[4] .. ' ' .. ARGV[5])
  redis.call('HSET', LONGEST, seq, ARGV[6])
  redis.call('HINCRBY', META, 'inserted', 1)
  make_ready(seq, ARGV[4], ARGV[5])
  wake_take_if_ready()
  return {'ok'}
end
redis.call('UNLINK', STAGE)
local past_inflight = not redis.call('ZSCORE', LEASES, seq)
if past_inflight and redis.call('HGET', ATTEMPTS, seq) == attempt then return {'ok'} end
return {ended_by('insert', seq, attempt) and 'ok' or 'lost'}

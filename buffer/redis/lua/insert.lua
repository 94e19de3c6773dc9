#!lua flags=allow-oom
-- INFLIGHT -> READY with the staged payload. ARGV[2..4]: seq, attempt, version of the oldest token.
local seq, attempt = ARGV[2], ARGV[3]
if holds(seq, attempt) then
  redis.call('RENAME', STAGE, payload('group', seq))
  redis.call('SADD', STORED, seq)
  redis.call('UNLINK', payload('task', seq), payload('partial', seq))
  redis.call('ZREM', LEASES, seq)
  for _, book in ipairs({STRIKES, VERSIONS}) do redis.call('HDEL', book, seq) end
  redis.call('HSET', OLDEST, seq, ARGV[4])
  wake_take_if_ready()
  return {'ok'}
end
redis.call('UNLINK', STAGE)
local past_inflight = not redis.call('ZSCORE', LEASES, seq)
if past_inflight and redis.call('HGET', ATTEMPTS, seq) == attempt then return {'ok'} end
return {ended_by('insert', seq, attempt) and 'ok' or 'lost'}

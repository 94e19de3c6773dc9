#!lua flags=allow-oom
-- After: books records
-- INFLIGHT -> READY with the payload that was SET before, at the key of this attempt, unless the memory was full; the
-- sender then knows. What nothing refers to goes when the lease ends. ARGV[2..6]: seq, attempt, versions of the
-- oldest and of the newest token, tokens of the longest completion.
local seq, attempt = ARGV[2], ARGV[3]
local record = held(seq, attempt)
local size = redis.call('STRLEN', group_payload(seq, attempt))
if record and size > 0 then
  redis.call('UNLINK', payload('task', seq), payload('partial', seq))
  redis.call('ZREM', LEASES, seq)
  redis.call('ZREM', BEGUN, seq)
  unhold(seq)
  record.strikes, record.pins = 0, 1
  record.oldest, record.newest, record.longest = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
  redis.call('HSET', GROUPS, seq, printed(record))
  redis.call('HINCRBY', META, 'inserted', 1)
  redis.call('HINCRBY', META, 'stored_bytes', size)
  redis.call('ZADD', READY, seq, seq)
  redis.call('ZADD', AGES, age_of(record, dial('on_stale')), seq)
  wake_take_if_ready()
  return {'ok'}
end
record = record_of(seq)
local finished = record and not redis.call('ZSCORE', LEASES, seq)
if finished and record.attempt == tonumber(attempt) then return {'ok'} end -- SET NX: its payload is the first one
redis.call('UNLINK', group_payload(seq, attempt))
return {ended_by('insert', seq, attempt) and 'ok' or 'lost'}

#!lua flags=allow-oom
-- Requires: state records
-- INFLIGHT -> READY. The payload was SET before, at the key of this attempt. ARGV[2..6]: seq, attempt, versions of the
-- oldest and of the newest token, tokens of the longest completion.
--
-- The script may run while Redis is out of memory (allow-oom): the payload is stored already, and inserting it frees the
-- task and the partial. If the SET itself failed for lack of memory, the client retries both. A payload without an
-- insert is deleted when the lease ends.
local seq = ARGV[2]
local attempt = ARGV[3]
local key = group_key(seq, attempt)
local record = read_leased_record(seq, attempt)
local size = redis.call('STRLEN', key)
if record and size > 0 then
  redis.call('UNLINK', payload_key('task', seq), payload_key('partial', seq))
  redis.call('ZREM', LEASES, seq)
  redis.call('ZREM', BEGUN, seq)
  remove_holder(seq)
  record.expired_leases = 0
  record.references = 1
  record.oldest = tonumber(ARGV[4])
  record.newest = tonumber(ARGV[5])
  record.longest = tonumber(ARGV[6])
  write_record(seq, record)
  redis.call('HINCRBY', META, 'inserted', 1)
  redis.call('HINCRBY', META, 'stored_bytes', size)
  redis.call('ZADD', READY, seq, seq)
  redis.call('ZADD', AGES, version_for_age(record, meta_text('on_stale')), seq)
  wake_trainer_if_ready()
  return {'ok'}
end

-- Either a retry of an insert that succeeded, or the lease is gone, or the payload was never stored. In a retry the
-- payload is still that of the first call, because SET has the option NX.
record = read_record(seq)
local was_inserted = record and not redis.call('ZSCORE', LEASES, seq)
if was_inserted and record.attempt == tonumber(attempt) then return {'ok'} end

-- Nothing refers to the payload. Without a payload a live lease counts as lost too: it expires, and the group is
-- generated again.
redis.call('UNLINK', key)
return {has_ended_by('insert', seq, attempt) and 'ok' or 'lost'}

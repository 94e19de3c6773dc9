#!lua flags=allow-oom
-- Requires: state records
-- Store the staged partial and renew the lease. ARGV[2..5]: seq, attempt, version of the oldest token (0 without
-- tokens), tokens of the longest completion.
local seq = ARGV[2]
local record = read_leased_record(seq, ARGV[3])
if not record then
  redis.call('UNLINK', STAGE)
  return {'lost'}
end
redis.call('RENAME', STAGE, payload_key('partial', seq))
redis.call('ZADD', LEASES, now_ms() + meta_number('lease_ms'), seq)
redis.call('ZADD', BEGUN, 'GT', ARGV[4], seq)
record.longest = tonumber(ARGV[5])
write_record(seq, record)
return {'ok'}

#!lua flags=allow-oom
-- Requires: state records
-- End a lease, so that the next admit can lease the group again. ARGV[2..4]: seq, attempt, 1 to count the lease as
-- expired (else 0). A repetition finds the lease ended, so it does not count twice.
local seq = ARGV[2]
local record = read_leased_record(seq, ARGV[3])
if record then
  record.expired_leases = record.expired_leases + tonumber(ARGV[4])
  write_record(seq, record)
  redis.call('ZADD', LEASES, 0, seq)
  remove_holder(seq)
  wake_waiter(WAKE_ADMIT)
end
return {'ok'}

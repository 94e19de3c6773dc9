#!lua flags=no-writes
-- Requires: state
-- Return a consistent snapshot: meta, released, lengths (as lists of name, value, ...), |leases|, |ready|, |taken|, and
-- the number of stored groups (those that have a record and no lease). No transaction: Redis 7.0 refuses those while
-- its memory is full, even if they only read.
local inflight = redis.call('ZCARD', LEASES)
return {
  redis.call('HGETALL', META),
  redis.call('HGETALL', RELEASED),
  redis.call('HGETALL', LENGTHS),
  inflight,
  redis.call('ZCARD', READY),
  redis.call('SCARD', TAKEN),
  redis.call('HLEN', GROUPS) - inflight,
}

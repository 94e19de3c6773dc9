#!lua flags=no-writes
-- Requires: state
-- Return all state keys for an observer: meta, leases, begun, ready, taken, groups, log (hashes and scored sets as
-- lists of name, value, ...), 1 if the run is drained, and the time. One script, so that they are consistent. No
-- transaction: Redis 7.0 refuses those while its memory is full, even if they only read.
return {
  redis.call('HGETALL', META),
  redis.call('ZRANGE', LEASES, 0, -1, 'WITHSCORES'),
  redis.call('ZRANGE', BEGUN, 0, -1, 'WITHSCORES'),
  redis.call('ZRANGE', READY, 0, -1),
  redis.call('SMEMBERS', TAKEN),
  redis.call('HGETALL', GROUPS),
  redis.call('HGETALL', LOG),
  redis.call('EXISTS', ARGV[1] .. 'drained'),
  redis.call('TIME'),
}

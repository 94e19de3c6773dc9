#!lua flags=no-writes
-- After: books
-- Everything that the books say, for whoever looks in from outside: meta, leases, begun, ready, taken, groups, log
-- (hashes and scored sets as lists of name, value, ...), whether the run is drained, and the time. A script for the
-- reason that stats.lua gives.
return {
  redis.call('HGETALL', META), redis.call('ZRANGE', LEASES, 0, -1, 'WITHSCORES'),
  redis.call('ZRANGE', BEGUN, 0, -1, 'WITHSCORES'), redis.call('ZRANGE', READY, 0, -1),
  redis.call('SMEMBERS', TAKEN), redis.call('HGETALL', GROUPS), redis.call('HGETALL', LOG),
  redis.call('EXISTS', ARGV[1] .. 'drained'), redis.call('TIME'),
}

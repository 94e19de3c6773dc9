#!lua flags=no-writes
-- One consistent look: meta, released, lengths (as lists of name, value, ...), |leases|, |ready|, |taken|, |pins|. A
-- script, and no transaction: Redis 7.0 refuses those while its memory is full, even if they only read.
return {
  redis.call('HGETALL', META), redis.call('HGETALL', RELEASED), redis.call('HGETALL', LENGTHS),
  redis.call('ZCARD', LEASES), redis.call('ZCARD', READY), redis.call('SCARD', TAKEN), redis.call('HLEN', PINS),
}

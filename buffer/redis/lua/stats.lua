-- One consistent look: the meta hash, then the sizes of INFLIGHT, READY and TAKEN.
local sizes = {}
for i, name in ipairs({'inflight', 'ready', 'taken'}) do sizes[i] = redis.call('ZCARD', key(name)) end
return {redis.call('HGETALL', meta_key), sizes}

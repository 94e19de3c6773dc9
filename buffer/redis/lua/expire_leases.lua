#!lua flags=allow-oom
-- After: books records lives
-- Expire the leases that a server took in lives that are over. ARGV[2], ARGV[3]: its name, the last of these lives.
-- Another release may have leased a group again and left its entry in HOLDERS: the attempt tells.
local name, last = ARGV[2], tonumber(ARGV[3])
local holders = redis.call('HGETALL', HOLDERS)
for i = 1, #holders, 2 do
  local seq, attempt, holder = holders[i], holders[i + 1]:match('^(%d+) (.*)$')
  if is_life_of(holder, name, last) and held(seq, attempt) then
    redis.call('ZADD', LEASES, 'LT', now_ms(), seq)
    wake(WAKE_ADMIT)
  end
end
for _, holder in ipairs(redis.call('HKEYS', WAITING)) do
  if is_life_of(holder, name, last) then redis.call('HDEL', WAITING, holder) end
end
return {'ok'}

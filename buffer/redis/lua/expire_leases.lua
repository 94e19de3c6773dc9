#!lua flags=allow-oom
-- Requires: state records holders
-- Expire the leases that a server took in lives that are over. ARGV[2], ARGV[3]: its name, the last of these lives.
local name = ARGV[2]
local last_life = tonumber(ARGV[3])
local holders = redis.call('HGETALL', HOLDERS)
for i = 1, #holders, 2 do
  local seq = holders[i]
  local attempt, holder = holders[i + 1]:match('^(%d+) (.*)$')
  -- Check the attempt: an older release may have leased the group again without updating HOLDERS.
  if is_life_of(holder, name, last_life) and read_leased_record(seq, attempt) then
    redis.call('ZADD', LEASES, 'LT', now_ms(), seq)
    wake_waiter(WAKE_ADMIT)
  end
end
for _, holder in ipairs(redis.call('HKEYS', WAITING_SERVERS)) do
  if is_life_of(holder, name, last_life) then redis.call('HDEL', WAITING_SERVERS, holder) end
end
return {'ok'}

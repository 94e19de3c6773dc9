-- Put before the body of every script of the buffer. KEYS are the books in the order of keys.py;
-- ARGV[1] is the prefix of the payload keys. Active groups: |OPEN| + |TAKEN|.
local META, RELEASED, OPEN, LEASES, ATTEMPTS, STRIKES, VERSIONS, OLDEST, TAKEN, LOG, ENDINGS, STORED,
  WAKE_ADMIT, WAKE_TAKE, STAGE = unpack(KEYS)
local ENDINGS_KEPT = 4096

local function meta(name)
  return tonumber(redis.call('HGET', META, name)) or 0
end

local function payload(kind, seq)
  return ARGV[1] .. kind .. ':' .. seq
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- At most one element a list: whoever takes it looks, and passes it on if there is more to do.
local function wake(list)
  if redis.call('LLEN', list) == 0 then redis.call('RPUSH', list, 1) end
end

local function wake_take_if_ready()
  if redis.call('HLEN', OLDEST) >= meta('groups_per_step') then wake(WAKE_TAKE) end
end

local function fenced(epoch)
  return tonumber(epoch) ~= meta('epoch')
end

-- Whether this attempt is the current one and was not given back. An expired lease that nobody has
-- taken over yet still belongs to its holder.
local function holds(seq, attempt)
  local deadline = redis.call('ZSCORE', LEASES, seq)
  return deadline and tonumber(deadline) > 0 and redis.call('HGET', ATTEMPTS, seq) == attempt
end

local function ending(how, seq, attempt)
  return how .. ':' .. seq .. ':' .. attempt
end

local function ended_by(how, seq, attempt)
  return redis.call('ZSCORE', ENDINGS, ending(how, seq, attempt)) and true or false
end

local function forget_payloads(seq)
  redis.call('UNLINK', payload('task', seq), payload('partial', seq), payload('group', seq))
  redis.call('SREM', STORED, seq)
end

-- The one place where a group is released. A repetition of the call `how` ('insert', 'discard' or
-- nil) is recognised from now on.
local function release(seq, reason, how)
  if how then
    local order = redis.call('HINCRBY', META, 'endings', 1)
    redis.call('ZADD', ENDINGS, order, ending(how, seq, redis.call('HGET', ATTEMPTS, seq)))
    redis.call('ZREMRANGEBYRANK', ENDINGS, 0, -ENDINGS_KEPT - 1)
  end
  redis.call('HINCRBY', RELEASED, reason, 1)
  redis.call('ZREM', OPEN, seq)
  redis.call('ZREM', LEASES, seq)
  for _, book in ipairs({ATTEMPTS, STRIKES, VERSIONS, OLDEST}) do redis.call('HDEL', book, seq) end
  redis.call('SREM', TAKEN, seq)
  if reason ~= 'trained' then forget_payloads(seq) end
  wake(WAKE_ADMIT)
end

-- Sequences that nobody holds, lowest first, without those that have no attempt left: these are
-- released as failed. A lease that was given back (deadline 0) is no strike.
local function expired(now)
  local again, limit = {}, meta('max_attempts')
  local over = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'WITHSCORES')
  for i = 1, #over, 2 do
    local seq, struck = over[i], tonumber(over[i + 1]) > 0 and 1 or 0
    if (tonumber(redis.call('HGET', STRIKES, seq)) or 0) + struck >= limit then
      release(seq, 'failed', nil)
      wake_take_if_ready()
    else
      again[#again + 1] = seq
    end
  end
  table.sort(again, function(a, b) return tonumber(a) < tonumber(b) end)
  return again
end

-- {'wait', ms until the next lease expires, or -1}
local function wait(now)
  local next_lease = redis.call('ZRANGEBYSCORE', LEASES, '(' .. string.format('%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return {'wait', next_lease[2] and next_lease[2] - now or -1}
end

-- Epoch and sequences of the batch taken for the step `version`, or nil.
local function logged(version)
  local entry = redis.call('HGET', LOG, version)
  if not entry then return nil end
  local epoch, list = entry:match('^(%d+)|(.*)$')
  local seqs = {}
  for seq in list:gmatch('%d+') do seqs[#seqs + 1] = seq end
  return tonumber(epoch), seqs
end

-- TAKEN -> RELEASED(trained) for the groups of a step, once a group; the payloads stay.
local function settle(version)
  local _, seqs = logged(version)
  for _, seq in ipairs(seqs or {}) do
    if redis.call('SISMEMBER', TAKEN, seq) == 1 then release(seq, 'trained', 'insert') end
  end
  return seqs or {}
end

local function steps_below(limit)
  local versions = {}
  for _, version in ipairs(redis.call('HKEYS', LOG)) do
    if tonumber(version) < tonumber(limit) then versions[#versions + 1] = version end
  end
  return versions
end

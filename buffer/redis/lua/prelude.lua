-- Put before the body of every script of the buffer. KEYS are the books in the order of keys.py: all of them,
-- so that a cluster refuses a script while their slot is half moved. ARGV[1] is the prefix of the payload keys.
-- Active groups: |OPEN| + |TAKEN|.
local META, RELEASED, LENGTHS, OPEN, READY, LEASES, BEGUN, OLDEST, NEWEST, VERSIONS, ATTEMPTS, STRIKES,
  LONGEST, USES, TAKEN, LOG, ENDINGS, PINS, WAKE_ADMIT, WAKE_TAKE, STAGE = unpack(KEYS)
local ENDINGS_KEPT, TRIM_EVERY = 4096, 64
local FORMAT = 2

local function dial(name)
  return redis.call('HGET', META, name)
end

local function meta(name)
  return tonumber(dial(name)) or 0
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
  if redis.call('ZCARD', READY) >= meta('groups_per_step') then wake(WAKE_TAKE) end
end

local function fenced(epoch)
  return tonumber(epoch) ~= meta('epoch')
end

-- ReplayPolicy, from ARGV[first] on.
local function write_policy(first)
  for i, name in ipairs({'max_staleness', 'groups_per_step', 'horizon', 'selector', 'selector_window', 'on_stale',
      'min_size', 'samples_per_insert', 'min_diff', 'max_diff', 'max_uses', 'seed'}) do
    redis.call('HSET', META, name, ARGV[first + i - 1])
  end
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

-- A finished group is kept while it is active, and once more for every logged step that has it.
local function pin(seq)
  redis.call('HINCRBY', PINS, seq, 1)
end

local function unpin(seq)
  if redis.call('HINCRBY', PINS, seq, -1) > 0 then return end
  redis.call('HDEL', PINS, seq)
  redis.call('UNLINK', payload('group', seq))
end

-- INFLIGHT or TAKEN -> READY, with the versions of the oldest and of the newest token.
local function make_ready(seq, oldest, newest)
  redis.call('ZADD', OPEN, seq, seq)
  redis.call('ZADD', READY, seq, seq)
  redis.call('ZADD', OLDEST, oldest, seq)
  redis.call('ZADD', NEWEST, newest, seq)
end

local function leave_ready(seq)
  for _, book in ipairs({OPEN, READY, OLDEST, NEWEST}) do redis.call('ZREM', book, seq) end
end

-- Completions by length: the power of two that the longest of the group does not exceed.
local function count_length(seq, reason)
  local longest, bucket = tonumber(redis.call('HGET', LONGEST, seq)) or 0, 1
  if longest == 0 then return end
  while bucket < longest do bucket = 2 * bucket end
  redis.call('HINCRBY', LENGTHS, reason .. ':' .. bucket, 1)
end

-- The one place where a group is released. A repetition of the call `how` ('insert', 'discard' or
-- nil) is recognised from now on.
local function release(seq, reason, how)
  if how then
    local order = redis.call('HINCRBY', META, 'endings', 1)
    redis.call('ZADD', ENDINGS, order, ending(how, seq, redis.call('HGET', ATTEMPTS, seq)))
    if order % TRIM_EVERY == 0 then redis.call('ZREMRANGEBYRANK', ENDINGS, 0, -ENDINGS_KEPT - 1) end
  end
  redis.call('HINCRBY', RELEASED, reason, 1)
  count_length(seq, reason)
  if redis.call('ZREM', LEASES, seq) == 1 then
    redis.call('ZREM', BEGUN, seq)
    redis.call('ZREM', OPEN, seq)
    redis.call('HDEL', STRIKES, seq)
    redis.call('UNLINK', payload('task', seq), payload('partial', seq))
  else
    if redis.call('SREM', TAKEN, seq) == 0 then leave_ready(seq) end
    redis.call('HDEL', VERSIONS, seq)
    redis.call('HDEL', USES, seq)
    unpin(seq)
  end
  redis.call('HDEL', ATTEMPTS, seq)
  redis.call('HDEL', LONGEST, seq)
  wake(WAKE_ADMIT)
end

-- A READY group that was trained before has not been in vain.
local function end_as_stale(seq)
  release(seq, redis.call('HEXISTS', USES, seq) == 1 and 'trained' or 'stale', 'insert')
end

-- The partial of a group that nobody holds, too old to go on with (too_old_to_finish in selection.py).
local function outdated(seq)
  return dial('on_stale') == 'drop'
    and meta('version') - redis.call('ZSCORE', BEGUN, seq) > meta('max_staleness')
    and redis.call('EXISTS', payload('partial', seq)) == 1
end

-- Sequences that nobody holds, lowest first. Those that have no attempt left end as failed (a lease
-- that was given back, deadline 0, is no strike), those with an outdated partial as expired.
local function unheld(now)
  local again, limit = {}, meta('max_attempts')
  local over = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'WITHSCORES')
  for i = 1, #over, 2 do
    local seq, struck = over[i], tonumber(over[i + 1]) > 0 and 1 or 0
    local failed = (tonumber(redis.call('HGET', STRIKES, seq)) or 0) + struck >= limit
    if failed or outdated(seq) then
      release(seq, failed and 'failed' or 'expired', nil)
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
  local after = '(' .. string.format('%.0f', now)
  local next_lease = redis.call('ZRANGEBYSCORE', LEASES, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return {'wait', next_lease[2] and next_lease[2] - now or -1}
end

-- The batch taken for the step `version`, or nil: epoch, whether it is settled, mask_below, sequences.
local function logged(version)
  local entry = redis.call('HGET', LOG, version)
  if not entry then return nil end
  local epoch, settled, mask_below, list = entry:match('^(%d+)|(%d)|(%d+)|(.*)$')
  local seqs = {}
  for seq in list:gmatch('%d+') do seqs[#seqs + 1] = seq end
  return {epoch = tonumber(epoch), settled = settled == '1', mask_below = tonumber(mask_below), seqs = seqs}
end

local function log(version, step)
  local settled = step.settled and 1 or 0
  redis.call('HSET', LOG, version,
    table.concat({step.epoch, settled, step.mask_below, table.concat(step.seqs, ',')}, '|'))
end

-- The groups of a step were trained, which counts once: TAKEN -> RELEASED(trained), or READY again.
local function settle(version)
  local step = logged(version)
  if not step or step.settled then return end
  step.settled = true
  log(version, step)
  local max_uses = meta('max_uses')
  for _, seq in ipairs(step.seqs) do
    if tonumber(redis.call('HGET', USES, seq)) >= max_uses then
      release(seq, 'trained', 'insert')
    else
      redis.call('SREM', TAKEN, seq)
      make_ready(seq, redis.call('HGET', VERSIONS, seq):match('^(%d+) (%d+)$'))
    end
  end
  wake_take_if_ready()
end

local function steps_below(limit)
  local versions = {}
  for _, version in ipairs(redis.call('HKEYS', LOG)) do
    if tonumber(version) < tonumber(limit) then versions[#versions + 1] = version end
  end
  return versions
end

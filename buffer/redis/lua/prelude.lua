#!lua flags=allow-oom
-- Put in front of every script. KEYS[1] is the run's meta hash; all other keys share its hash tag, so they
-- live on the same node. Transitions only move small values; payloads are written and read by plain SET and
-- MGET, and named here only to be deleted. allow-oom: a full server must still be able to drain.
local meta_key = KEYS[1]
local root = string.sub(meta_key, 1, -5) -- without "meta"

local function key(name) return root .. name end
local function number(field) return tonumber(redis.call('HGET', meta_key, field) or '0') end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A wake list holds at most a few tokens: each lets one waiting client look again.
local function wake(name)
  local list = key('wake:' .. name)
  if redis.call('LLEN', list) < 16 then redis.call('LPUSH', list, 1) end
end

local function fenced(epoch) return tonumber(epoch) < number('epoch') end

local function forget_payloads(seq)
  local attempt = redis.call('HGET', key('attempt'), seq)
  local partial = redis.call('HGET', key('partial'), seq)
  if attempt then redis.call('UNLINK', key('group:' .. seq .. ':' .. attempt)) end
  if partial then redis.call('UNLINK', key('partial:' .. seq .. ':' .. partial)) end
  redis.call('UNLINK', key('task:' .. seq))
  for _, name in ipairs({'attempt', 'partial', 'admitted_version', 'oldest', 'strikes'}) do
    redis.call('HDEL', key(name), seq)
  end
end

-- INFLIGHT or READY -> RELEASED(reason), untrained: the slot is free and the payloads are gone.
local function discard(seq, reason)
  redis.call('ZREM', key('inflight'), seq)
  redis.call('ZREM', key('ready'), seq)
  redis.call('ZREM', key('order'), seq)
  redis.call('HINCRBY', meta_key, 'released:' .. reason, 1)
  redis.call('HINCRBY', meta_key, 'discarded', 1)
  redis.call('HINCRBY', meta_key, 'released', 1)
  forget_payloads(seq)
  wake('admit')
  wake('take')
end

-- How many groups may be admitted now; staleness/window.py states the same.
local function room()
  local admitted, released = number('admitted'), number('released')
  local capacity = (number('max_staleness') + 1) * number('groups_per_step')
  local free = capacity - (admitted - released)
  local left = number('horizon') - (admitted - number('discarded'))
  local tasks = number('tasks_put') - admitted
  return math.max(0, math.min(free, left, tasks))
end

-- Whether this attempt still holds the ticket; a group that has ended has no attempt any more.
local function holds(seq, attempt) return redis.call('HGET', key('attempt'), seq) == attempt end

-- Defines the state keys, meta_text, meta_number, payload_key, now_ms, wake_waiter, wake_trainer_if_ready, is_fenced.

-- State keys, in the order of _STATE_KEYS in scripts.py. Every script declares all of them, so that a cluster rejects
-- it during a migration of their slot. ARGV[1] is the prefix of the payload keys. Active groups: |OPEN| + |TAKEN|.
local META, RELEASED, LENGTHS, OPEN, READY, LEASES, BEGUN, AGES, GROUPS, TAKEN, LOG, ENDINGS, WAKE_ADMIT, WAKE_TAKE,
  STAGE, HOLDERS, HELD, WAITING_SERVERS = unpack(KEYS)

local function meta_text(name)
  return redis.call('HGET', META, name)
end

local function meta_number(name)
  return tonumber(meta_text(name)) or 0
end

local function payload_key(kind, id)
  return ARGV[1] .. kind .. ':' .. id
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Wake one process that waits on the list by BLPOP. The list has at most one element: the process that takes it makes
-- its call again, and that call puts a new element if another process could succeed, too.
local function wake_waiter(list)
  if redis.call('LLEN', list) == 0 then redis.call('RPUSH', list, 1) end
end

-- `wanted`: number of READY groups that the blocked take needs.
local function wake_trainer_if_ready()
  if redis.call('ZCARD', READY) >= meta_number('wanted') then wake_waiter(WAKE_TAKE) end
end

local function is_fenced(epoch)
  return tonumber(epoch) ~= meta_number('epoch')
end

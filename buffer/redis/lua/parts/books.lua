-- State keys, in the order of _STATE_KEYS in scripts.py. Every script declares all of them, so that a cluster refuses it
-- while their slot is half moved. ARGV[1] is the prefix of the payload keys. Active groups: |OPEN| + |TAKEN|.
local META, RELEASED, LENGTHS, OPEN, READY, LEASES, BEGUN, AGES, GROUPS, TAKEN, LOG, ENDINGS, WAKE_ADMIT, WAKE_TAKE,
  STAGE, HOLDERS, HELD, WAITING = unpack(KEYS)

local function dial(name)
  return redis.call('HGET', META, name)
end

local function meta(name)
  return tonumber(dial(name)) or 0
end

local function payload(kind, id)
  return ARGV[1] .. kind .. ':' .. id
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- At most one element a list: whoever takes it looks, and passes it on if there is more to do.
local function wake(list)
  if redis.call('LLEN', list) == 0 then redis.call('RPUSH', list, 1) end
end

-- `wanted`: how many READY groups the last take that had to wait could not do without.
local function wake_take_if_ready()
  if redis.call('ZCARD', READY) >= meta('wanted') then wake(WAKE_TAKE) end
end

local function fenced(epoch)
  return tonumber(epoch) ~= meta('epoch')
end

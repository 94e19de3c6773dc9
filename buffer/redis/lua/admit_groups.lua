#!lua
-- Requires: state pages records record_lists endings leases
-- WAITING -> INFLIGHT for new groups, and a next lease for groups without a holder. See BufferState.admit_groups.
--   ARGV[1]  prefix of the payload keys
--   ARGV[2]  limit: groups that the server wants
--   ARGV[3]  id of the request, the same in a repetition
--   ARGV[4]  holder: the server
--   ARGV[5]  slots: groups that an idle server would take
--   ARGV[6]  reserved_since: number of an earlier request that was answered 'kept', 0 for none. The server has waited
--            since, so a server that has not asked again after that number is presumed dead
--
-- Returns one of
--   {'ok', epoch, lease_ms, seq, attempt, expired_leases, version, task, partial, ...}
--   {'wait', ms}     no room; ms until the next lease expires, or -1
--   {'kept', number} room, but reserved for other servers; the number of this unserved request
--   {'ended'}
-- A repetition of the same request gets the same leases again, as far as they are still valid.
local limit = tonumber(ARGV[2])
local request_key = payload_key('grant', ARGV[3])
local holder = ARGV[4]
local slots = tonumber(ARGV[5])
local reserved_since = tonumber(ARGV[6])
local now = now_ms()

-- Read all counters and settings in one command: this script runs most often.
local META_FIELDS = {
  'lease_ms', 'version', 'staleness', 'groups_per_step', 'horizon', 'min_size', 'samples_per_insert', 'max_diff', 'used',
  'inserted', 'tasks_put', 'admitted', 'ended', 'epoch', 'used_active', 'stored_bytes', 'room_bytes', 'group_bytes',
}
local UNLIMITED_DIFF = 1e15 -- staleness.py writes a larger max_diff if the ratio is not limited
local run = {}
for i, value in ipairs(redis.call('HMGET', META, unpack(META_FIELDS))) do
  run[META_FIELDS[i]] = tonumber(value) or 0
end

local reply = {'ok', run.epoch, run.lease_ms}
local leases = {}

local function add_lease(seq, attempt, expired_leases, start_version, task, partial)
  for _, value in ipairs({tonumber(seq), tonumber(attempt), expired_leases, tonumber(start_version), task, partial}) do
    reply[#reply + 1] = value
  end
  leases[#leases + 1] = seq .. ':' .. attempt
end

-- Lease a group without a holder. Without a partial it starts on the newest version. With one it keeps the version of
-- its tokens.
local function lease_again(seq)
  local record = read_record(seq)
  local partial = redis.call('GET', payload_key('partial', seq))
  -- give_back sets the deadline 0. Any other lease without a holder has expired.
  if tonumber(redis.call('ZSCORE', LEASES, seq)) > 0 then
    record.expired_leases = record.expired_leases + 1
  end
  local start_version = run.version
  if partial then
    start_version = redis.call('ZSCORE', BEGUN, seq)
  else
    redis.call('ZADD', BEGUN, start_version, seq)
  end

  -- Delete a payload of the last attempt whose insert script never ran: nothing refers to it any more.
  redis.call('UNLINK', group_key(seq, record.attempt))
  record.attempt = record.attempt + 1
  write_record(seq, record)
  redis.call('ZADD', LEASES, now + run.lease_ms, seq)
  remove_holder(seq)
  redis.call('HSET', HOLDERS, seq, record.attempt .. ' ' .. holder)
  redis.call('HINCRBY', HELD, holder, 1)
  local task = redis.call('GET', payload_key('task', seq))
  add_lease(seq, record.attempt, record.expired_leases, start_version, task, partial)
end

-- WAITING -> INFLIGHT for `count` new groups.
local function lease_new(first_seq, count)
  local new_record = format_record(
    {attempt = 1, expired_leases = 0, longest = 0, oldest = 0, newest = 0, uses = 0, references = 0})
  local open = {}
  local start_versions = {}
  local deadlines = {}
  local records = {}
  local holders = {}
  local task_keys = {}
  for i = 1, count do
    local seq = first_seq + i - 1
    local odd = 2 * i - 1
    local even = 2 * i
    -- Sorted sets take (score, member), hashes (field, value).
    open[odd], open[even] = seq, seq
    start_versions[odd], start_versions[even] = run.version, seq
    deadlines[odd], deadlines[even] = now + run.lease_ms, seq
    records[odd], records[even] = seq, new_record
    holders[odd], holders[even] = seq, '1 ' .. holder
    task_keys[i] = payload_key('task', seq)
  end
  call_with_values('ZADD', OPEN, open)
  call_with_values('ZADD', BEGUN, start_versions)
  call_with_values('ZADD', LEASES, deadlines)
  call_with_values('HSET', GROUPS, records)
  call_with_values('HSET', HOLDERS, holders)
  redis.call('HINCRBY', HELD, holder, count)
  redis.call('HINCRBY', META, 'admitted', count)

  for page = 1, count, PAGE do
    local tasks = redis.call('MGET', unpack(task_keys, page, math.min(page + PAGE - 1, count)))
    for i, task in ipairs(tasks) do
      add_lease(first_seq + page + i - 2, 1, 0, run.version, task, false)
    end
  end
end

-- Number of new groups that may be admitted: BufferState._new_group_room, with the arithmetic of RateLimit in
-- staleness.py and of MemoryQuota in capacity.py. With a limited ratio it includes slots of READY groups that can be
-- evicted.
local function new_group_room(active, inflight, free_window)
  local by_size = math.max(run.min_size, run.groups_per_step) - active
  local by_ratio = math.floor((run.max_diff + run.used) / run.samples_per_insert) - (run.inserted + inflight)
  local room = math.min(run.tasks_put - run.admitted, math.max(by_size, by_ratio))
  if run.room_bytes > 0 then
    local by_quota = math.floor((run.room_bytes - run.stored_bytes) / math.max(1, run.group_bytes)) - inflight
    room = math.min(room, by_quota)
  end
  -- Groups that are used several times outlive the window. Then new groups replace the oldest READY ones, and how many
  -- the end of the run still needs cannot be known.
  local is_ratio_limited = run.max_diff < UNLIMITED_DIFF
  if is_ratio_limited then return math.max(0, math.min(room, free_window + redis.call('ZCARD', READY))) end
  -- Near the end of the run, admit no group that would not be trained. `used` counts `used_active` of the active groups
  -- already.
  local by_horizon = run.horizon - (run.used + active - run.used_active)
  return math.max(0, math.min(room, free_window, by_horizon))
end

-- Free slots of a server. Groups that it had at its request may have ended since.
local function free_slots_now(name, wanted, server_slots)
  local held = tonumber(redis.call('HGET', HELD, name)) or 0
  return math.max(wanted, server_slots - held)
end

-- The other waiting servers. Removes those without a request since `reserved_since`, which are presumed dead.
local function read_other_servers()
  local others = {}
  local waiting = redis.call('HGETALL', WAITING_SERVERS)
  for i = 1, #waiting, 2 do
    local name = waiting[i]
    local wanted, server_slots, request_number = waiting[i + 1]:match('^(%d+) (%d+) (%d+)$')
    if tonumber(request_number) <= reserved_since then
      redis.call('HDEL', WAITING_SERVERS, name)
    elseif name ~= holder then
      local free = free_slots_now(name, tonumber(wanted), tonumber(server_slots))
      others[#others + 1] = {free = free, slots = tonumber(server_slots)}
    end
  end
  return others
end

-- Number of groups for this server: fair_share in fair_share.py. Groups go one by one to the server with the largest
-- fraction of free slots, and to this one if there is a tie. So find the largest count for which this server's last group
-- and those that the others get before it fit into the room.
local function fair_share(free_slots, others, room)
  local low = 0
  local high = math.min(free_slots, room)
  while low < high do
    local count = math.ceil((low + high) / 2)
    local free = free_slots - count + 1
    local groups_before = 0
    for _, other in ipairs(others) do
      local groups = math.ceil((other.free * slots - free * other.slots) / slots)
      groups_before = groups_before + math.max(0, math.min(other.free, groups))
    end
    if groups_before + count <= room then
      low = count
    else
      high = count - 1
    end
  end
  return low
end

-- A repetition, because the reply was lost: return the leases that the first execution granted and that are still valid.
for seq, attempt in (redis.call('GET', request_key) or ''):gmatch('(%d+):(%d+)') do
  local record = read_leased_record(seq, attempt)
  if record then
    local payloads = redis.call('MGET', payload_key('task', seq), payload_key('partial', seq))
    add_lease(seq, attempt, record.expired_leases, redis.call('ZSCORE', BEGUN, seq), payloads[1], payloads[2])
  end
end
if #leases > 0 then return reply end

if run.ended == 1 then
  wake_waiter(WAKE_ADMIT) -- the next server that waits has to end, too
  return {'ended'}
end

local available = reclaim_expired_leases(now)
local inflight = redis.call('ZCARD', LEASES)
local active = redis.call('ZCARD', OPEN) + redis.call('SCARD', TAKEN)
local free_window = math.max(0, (run.staleness + 1) * run.groups_per_step - active)
local room = #available + new_group_room(active, inflight, free_window)
local fair = fair_share(free_slots_now(holder, limit, slots), read_other_servers(), room)
local share = math.min(limit, fair)

if share == 0 then
  local request_number = redis.call('HINCRBY', META, 'asks', 1)
  redis.call('HSET', WAITING_SERVERS, holder, limit .. ' ' .. slots .. ' ' .. request_number)
  if room == 0 then return wait_reply(now) end
  wake_waiter(WAKE_ADMIT) -- the room is for the others
  return {'kept', request_number}
end
redis.call('HDEL', WAITING_SERVERS, holder)

-- Groups without a holder first: they are the oldest, and the next batch may wait for them.
for i = 1, math.min(share, #available) do
  lease_again(available[i])
end
local new_count = math.max(0, share - #available)
-- More than the window has room for: with a limited ratio, they replace the oldest READY groups.
if new_count > free_window then end_as_stale(redis.call('ZRANGE', READY, 0, new_count - free_window - 1)) end
if new_count > 0 then lease_new(run.admitted, new_count) end
redis.call('SET', request_key, table.concat(leases, ','), 'PX', run.lease_ms)
if room > share then wake_waiter(WAKE_ADMIT) end
return reply

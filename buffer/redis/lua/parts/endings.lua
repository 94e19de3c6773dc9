-- Defines drop_references, remove_from_ready, release_unfinished, release_finished, end_as_stale.

local MAX_ENDINGS = 4096
local TRIM_EVERY = 64

-- Decrement the reference counts of these finished groups, and delete the payloads and records that reach zero. That
-- frees room under a quota.
local function drop_references(seqs, records)
  local kept_seqs = {}
  local kept_records = {}
  local dropped_seqs = {}
  local dropped_keys = {}
  local dropped_bytes = 0
  for i, seq in ipairs(seqs) do
    local record = records[i]
    record.references = record.references - 1
    if record.references > 0 then
      kept_seqs[#kept_seqs + 1] = seq
      kept_records[#kept_records + 1] = record
    else
      local key = group_key(seq, record.attempt)
      dropped_seqs[#dropped_seqs + 1] = seq
      dropped_keys[#dropped_keys + 1] = key
      dropped_bytes = dropped_bytes + redis.call('STRLEN', key)
    end
  end

  write_records(kept_seqs, kept_records)
  call_with_values('HDEL', GROUPS, dropped_seqs)
  unlink_keys(dropped_keys)
  if #dropped_seqs > 0 then
    redis.call('HINCRBY', META, 'stored_bytes', -dropped_bytes)
    wake_waiter(WAKE_ADMIT)
  end
end

local function remove_from_ready(seqs)
  for _, key in ipairs({OPEN, READY, AGES}) do
    call_with_values('ZREM', key, seqs)
  end
end

-- Count groups by length: the smallest power of two that is at least the length of the group's longest completion.
local function count_lengths(records, reason)
  local counts = {}
  for _, record in ipairs(records) do
    if record.longest > 0 then
      local bucket = 1
      while bucket < record.longest do bucket = 2 * bucket end
      counts[bucket] = (counts[bucket] or 0) + 1
    end
  end
  for bucket, count in pairs(counts) do
    redis.call('HINCRBY', LENGTHS, reason .. ':' .. bucket, count)
  end
end

-- Count the groups as ended; the only place that does. `call`: the holder's last call for these groups ('insert' or
-- 'discard'), whose repetition is recognised from now on, or nil.
local function count_endings(seqs, records, reason, call)
  if call then
    local last = redis.call('HINCRBY', META, 'endings', #seqs)
    local values = {}
    for i, seq in ipairs(seqs) do
      values[2 * i - 1] = last - #seqs + i
      values[2 * i] = ending_name(call, seq, records[i].attempt)
    end
    call_with_values('ZADD', ENDINGS, values)
    if last % TRIM_EVERY < #seqs then redis.call('ZREMRANGEBYRANK', ENDINGS, 0, -MAX_ENDINGS - 1) end
  end
  redis.call('HINCRBY', RELEASED, reason, #seqs)
  count_lengths(records, reason)
  wake_waiter(WAKE_ADMIT)
end

-- INFLIGHT -> RELEASED.
local function release_unfinished(seq, reason, call)
  local record = read_record(seq)
  count_endings({seq}, {record}, reason, call)
  for _, key in ipairs({LEASES, BEGUN, OPEN}) do
    redis.call('ZREM', key, seq)
  end
  redis.call('HDEL', GROUPS, seq)
  remove_holder(seq)
  -- Also delete a group payload whose insert script never ran, because its rollout server died after the SET.
  redis.call('UNLINK', payload_key('task', seq), payload_key('partial', seq), group_key(seq, record.attempt))
end

-- READY or TAKEN -> RELEASED.
local function release_finished(seqs, records, reason)
  if #seqs == 0 then return end
  count_endings(seqs, records, reason, 'insert')
  local used_groups = 0
  for _, record in ipairs(records) do
    if record.uses > 0 then used_groups = used_groups + 1 end
    record.uses = 0
  end
  if used_groups > 0 then redis.call('HINCRBY', META, 'used_active', -used_groups) end
  remove_from_ready(seqs)
  call_with_values('SREM', TAKEN, seqs)
  drop_references(seqs, records)
end

-- End READY groups as stale, or as trained if they were trained at least once.
local function end_as_stale(seqs)
  local trained_seqs = {}
  local trained_records = {}
  local stale_seqs = {}
  local stale_records = {}
  for i, record in ipairs(read_records(seqs)) do
    if record.uses > 0 then
      trained_seqs[#trained_seqs + 1] = seqs[i]
      trained_records[#trained_records + 1] = record
    else
      stale_seqs[#stale_seqs + 1] = seqs[i]
      stale_records[#stale_records + 1] = record
    end
  end
  release_finished(trained_seqs, trained_records, 'trained')
  release_finished(stale_seqs, stale_records, 'stale')
end

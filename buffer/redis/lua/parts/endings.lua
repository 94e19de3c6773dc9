local ENDINGS_KEPT, TRIM_EVERY = 4096, 64

-- One reason less to keep these finished groups. What goes makes room under a quota.
local function unpin(seqs, records)
  local kept, kept_records, gone, payloads, size = {}, {}, {}, {}, 0
  for i, seq in ipairs(seqs) do
    local record = records[i]
    record.pins = record.pins - 1
    if record.pins > 0 then
      kept[#kept + 1], kept_records[#kept + 1] = seq, record
    else
      gone[#gone + 1], payloads[#gone + 1] = seq, group_payload(seq, record.attempt)
      size = size + redis.call('STRLEN', payloads[#payloads])
    end
  end
  store(kept, kept_records)
  call_with('HDEL', GROUPS, gone)
  unlink(payloads)
  if #gone > 0 then
    redis.call('HINCRBY', META, 'stored_bytes', -size)
    wake(WAKE_ADMIT)
  end
end

local function leave_ready(seqs)
  for _, book in ipairs({OPEN, READY, AGES}) do call_with('ZREM', book, seqs) end
end

-- Completions by length: the power of two that the longest of the group does not exceed.
local function count_lengths(records, reason)
  local counts = {}
  for _, record in ipairs(records) do
    local bucket = 1
    while bucket < record.longest do bucket = 2 * bucket end
    if record.longest > 0 then counts[bucket] = (counts[bucket] or 0) + 1 end
  end
  for bucket, count in pairs(counts) do redis.call('HINCRBY', LENGTHS, reason .. ':' .. bucket, count) end
end

-- The one place where groups end. A repetition of the call `how` ('insert', 'discard' or nil) is recognised
-- from now on.
local function count_out(seqs, records, reason, how)
  if how then
    local last, values = redis.call('HINCRBY', META, 'endings', #seqs), {}
    for i, seq in ipairs(seqs) do
      values[2 * i - 1], values[2 * i] = last - #seqs + i, ending(how, seq, records[i].attempt)
    end
    call_with('ZADD', ENDINGS, values)
    if last % TRIM_EVERY < #seqs then redis.call('ZREMRANGEBYRANK', ENDINGS, 0, -ENDINGS_KEPT - 1) end
  end
  redis.call('HINCRBY', RELEASED, reason, #seqs)
  count_lengths(records, reason)
  wake(WAKE_ADMIT)
end

-- INFLIGHT -> RELEASED. A payload of its may lie there that came just before its server was restarted.
local function release_unfinished(seq, reason, how)
  local record = record_of(seq)
  count_out({seq}, {record}, reason, how)
  for _, book in ipairs({LEASES, BEGUN, OPEN}) do redis.call('ZREM', book, seq) end
  redis.call('HDEL', GROUPS, seq)
  unhold(seq)
  redis.call('UNLINK', payload('task', seq), payload('partial', seq), group_payload(seq, record.attempt))
end

-- READY or TAKEN -> RELEASED.
local function release_finished(seqs, records, reason)
  if #seqs == 0 then return end
  count_out(seqs, records, reason, 'insert')
  local used = 0
  for _, record in ipairs(records) do
    if record.uses > 0 then used = used + 1 end
    record.uses = 0
  end
  if used > 0 then redis.call('HINCRBY', META, 'used_active', -used) end
  leave_ready(seqs)
  call_with('SREM', TAKEN, seqs)
  unpin(seqs, records)
end

-- READY groups that nobody will train. Those that were trained before have not been in vain.
local function end_as_stale(seqs)
  local by_reason = {trained = {{}, {}}, stale = {{}, {}}}
  for i, record in ipairs(records_of(seqs)) do
    local ended, records = unpack(by_reason[record.uses > 0 and 'trained' or 'stale'])
    ended[#ended + 1], records[#records + 1] = seqs[i], record
  end
  for reason, found in pairs(by_reason) do release_finished(found[1], found[2], reason) end
end

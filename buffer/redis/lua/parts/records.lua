-- Defines parse_record, format_record, read_record, write_record, group_key, read_leased_record, remove_holder,
-- ending_name, has_ended_by, version_for_age.

-- The record of one group:
--   attempt         number of leases so far
--   expired_leases  number of leases that expired, or whose engine died
--   longest         tokens of its longest completion
--   oldest, newest  versions of its oldest and newest token, once it is finished
--   uses            number of times that it was taken while active
--   references      reasons to keep its payload: 1 while it is finished and active, 1 per logged step that has it
local RECORD = '%d %d %d %d %d %d %d'
local RECORD_PATTERN = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$'

local function parse_record(text)
  if not text then return nil end
  local attempt, expired_leases, longest, oldest, newest, uses, references = text:match(RECORD_PATTERN)
  return {
    attempt = tonumber(attempt),
    expired_leases = tonumber(expired_leases),
    longest = tonumber(longest),
    oldest = tonumber(oldest),
    newest = tonumber(newest),
    uses = tonumber(uses),
    references = tonumber(references),
  }
end

local function format_record(record)
  return RECORD:format(record.attempt, record.expired_leases, record.longest, record.oldest, record.newest, record.uses,
    record.references)
end

local function read_record(seq)
  return parse_record(redis.call('HGET', GROUPS, seq))
end

local function write_record(seq, record)
  redis.call('HSET', GROUPS, seq, format_record(record))
end

local function group_key(seq, attempt)
  return payload_key('group', seq .. ':' .. attempt)
end

-- The record, if this attempt has a valid lease: it is the newest one and was not given back (deadline 0). An expired
-- lease is valid until another holder takes over, so that finished work is not lost.
local function read_leased_record(seq, attempt)
  local deadline = redis.call('ZSCORE', LEASES, seq)
  if not deadline or tonumber(deadline) <= 0 then return nil end
  local record = read_record(seq)
  if record.attempt ~= tonumber(attempt) then return nil end
  return record
end

-- No effect if the group has no holder.
local function remove_holder(seq)
  local entry = redis.call('HGET', HOLDERS, seq)
  if not entry then return end
  local holder = entry:match('^%d+ (.*)$')
  redis.call('HDEL', HOLDERS, seq)
  if redis.call('HINCRBY', HELD, holder, -1) <= 0 then redis.call('HDEL', HELD, holder) end
end

local function ending_name(call, seq, attempt)
  return call .. ':' .. seq .. ':' .. attempt
end

-- True if the group ended after this call of this attempt, so that the call is a repetition.
local function has_ended_by(call, seq, attempt)
  return redis.call('ZSCORE', ENDINGS, ending_name(call, seq, attempt)) and true or false
end

-- The version of a finished group that decides whether it is too old, as too_old_to_train in selection.py: under mask a
-- group is of use as long as its newest tokens are.
local function version_for_age(record, on_stale)
  if on_stale == 'mask' then return record.newest end
  return record.oldest
end

-- What is known of one group: attempt (leases so far), strikes (those that expired, or whose engine died), longest
-- (tokens of its longest completion), oldest and newest (versions of its tokens, once it is finished), uses (how often
-- it was taken while active), pins (reasons to keep its payload: it is finished and active; a logged step has it).
local RECORD = '%d %d %d %d %d %d %d'
local RECORD_PATTERN = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$'

local function parsed(text)
  if not text then return nil end
  local attempt, strikes, longest, oldest, newest, uses, pins = text:match(RECORD_PATTERN)
  return {attempt = tonumber(attempt), strikes = tonumber(strikes), longest = tonumber(longest),
    oldest = tonumber(oldest), newest = tonumber(newest), uses = tonumber(uses), pins = tonumber(pins)}
end

local function printed(record)
  return RECORD:format(record.attempt, record.strikes, record.longest, record.oldest, record.newest, record.uses,
    record.pins)
end

local function record_of(seq)
  return parsed(redis.call('HGET', GROUPS, seq))
end

local function group_payload(seq, attempt)
  return payload('group', seq .. ':' .. attempt)
end

-- The record, if this attempt is the current one and was not given back. An expired lease that nobody has taken
-- over yet still belongs to its holder.
local function held(seq, attempt)
  local deadline = redis.call('ZSCORE', LEASES, seq)
  if not deadline or tonumber(deadline) <= 0 then return nil end
  local record = record_of(seq)
  return record.attempt == tonumber(attempt) and record or nil
end

-- Nobody holds the group any more; no effect if nobody did.
local function unhold(seq)
  local entry = redis.call('HGET', HOLDERS, seq)
  if not entry then return end
  local holder = entry:match('^%d+ (.*)$')
  redis.call('HDEL', HOLDERS, seq)
  if redis.call('HINCRBY', HELD, holder, -1) <= 0 then redis.call('HDEL', HELD, holder) end
end

local function ending(how, seq, attempt)
  return how .. ':' .. seq .. ':' .. attempt
end

local function ended_by(how, seq, attempt)
  return redis.call('ZSCORE', ENDINGS, ending(how, seq, attempt)) and true or false
end

-- Which of a finished group's versions decides whether it is too old (too_old_to_train in selection.py).
local function age_of(record, on_stale)
  return on_stale == 'mask' and record.newest or record.oldest
end

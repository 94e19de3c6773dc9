-- Defines mark_step_trained, steps_below.

-- TAKEN -> RELEASED(trained) for the groups of a step, or READY again if they have uses left. No effect the second
-- time.
local function mark_step_trained(version)
  local step = read_step(version)
  if not step or step.is_trained then return end
  step.is_trained = true
  write_step(version, step)

  local max_uses = meta_number('max_uses')
  local on_stale = meta_text('on_stale')
  local ended_seqs = {}
  local ended_records = {}
  for i, record in ipairs(read_records(step.seqs)) do
    local seq = step.seqs[i]
    if record.uses >= max_uses then
      ended_seqs[#ended_seqs + 1] = seq
      ended_records[#ended_records + 1] = record
    else
      redis.call('SREM', TAKEN, seq)
      redis.call('ZADD', OPEN, seq, seq)
      redis.call('ZADD', READY, seq, seq)
      redis.call('ZADD', AGES, version_for_age(record, on_stale), seq)
    end
  end
  release_finished(ended_seqs, ended_records, 'trained')
  wake_trainer_if_ready()
end

local function steps_below(limit)
  local versions = {}
  for _, version in ipairs(redis.call('HKEYS', LOG)) do
    if tonumber(version) < tonumber(limit) then versions[#versions + 1] = version end
  end
  return versions
end

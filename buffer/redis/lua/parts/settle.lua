-- The groups of a step were trained, which counts once: TAKEN -> RELEASED(trained), or READY again.
local function settle(version)
  local step = logged(version)
  if not step or step.settled then return end
  step.settled = true
  log(version, step)
  local max_uses, ended, ended_records = meta('max_uses'), {}, {}
  for i, record in ipairs(records_of(step.seqs)) do
    if record.uses >= max_uses then
      ended[#ended + 1], ended_records[#ended + 1] = step.seqs[i], record
    else
      redis.call('SREM', TAKEN, step.seqs[i])
      redis.call('ZADD', OPEN, step.seqs[i], step.seqs[i])
      redis.call('ZADD', READY, step.seqs[i], step.seqs[i])
      redis.call('ZADD', AGES, age_of(record, dial('on_stale')), step.seqs[i])
    end
  end
  release_finished(ended, ended_records, 'trained')
  wake_take_if_ready()
end

local function steps_below(limit)
  local versions = {}
  for _, version in ipairs(redis.call('HKEYS', LOG)) do
    if tonumber(version) < tonumber(limit) then versions[#versions + 1] = version end
  end
  return versions
end

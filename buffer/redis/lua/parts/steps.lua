-- Defines read_step, write_step: the batches that were taken, in the hash LOG.
--   version -> epoch|settled|mask_below|size|seq,seq,...
--   settled: 1 if the groups were counted as trained; size: number of groups of the complete batch

-- The batch taken for the step `version`, or nil.
local function read_step(version)
  local entry = redis.call('HGET', LOG, version)
  if not entry then return nil end
  local epoch, settled, mask_below, size, list = entry:match('^(%d+)|(%d)|(%d+)|(%d+)|(.*)$')
  local seqs = {}
  for seq in list:gmatch('%d+') do
    seqs[#seqs + 1] = seq
  end
  return {
    epoch = tonumber(epoch),
    is_trained = settled == '1',
    mask_below = tonumber(mask_below),
    size = tonumber(size),
    seqs = seqs,
  }
end

local function write_step(version, step)
  local settled = step.is_trained and 1 or 0
  local fields = {step.epoch, settled, step.mask_below, step.size, table.concat(step.seqs, ',')}
  redis.call('HSET', LOG, version, table.concat(fields, '|'))
end

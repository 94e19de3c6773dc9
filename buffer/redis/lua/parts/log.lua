-- The batch taken for the step `version`, or nil: epoch, whether it is settled, mask_below, how many groups it is to
-- have, and the sequences of those that it has.
local function logged(version)
  local entry = redis.call('HGET', LOG, version)
  if not entry then return nil end
  local epoch, settled, mask_below, size, list = entry:match('^(%d+)|(%d)|(%d+)|(%d+)|(.*)$')
  local seqs = {}
  for seq in list:gmatch('%d+') do seqs[#seqs + 1] = seq end
  return {epoch = tonumber(epoch), settled = settled == '1', mask_below = tonumber(mask_below), size = tonumber(size),
    seqs = seqs}
end

local function log(version, step)
  local settled = step.settled and 1 or 0
  redis.call('HSET', LOG, version,
    table.concat({step.epoch, settled, step.mask_below, step.size, table.concat(step.seqs, ',')}, '|'))
end

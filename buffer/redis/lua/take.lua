-- READY -> TAKEN: the P oldest groups for one step, all or nothing. ARGV: epoch, version.
-- Returns {'OK', replayed, {seq, attempt}, ...}, {'WAIT', ready, P}, {'FENCED', epoch} or {'ENDED'}.
if fenced(ARGV[1]) then return {'FENCED', number('epoch')} end

local function deliver(seqs, replayed)
  local batch = {'OK', replayed}
  for _, seq in ipairs(seqs) do batch[#batch + 1] = {seq, redis.call('HGET', key('attempt'), seq)} end
  return batch
end

local logged = redis.call('HGET', key('log'), ARGV[2])
if logged then
  local seqs, epoch = {}, nil
  for part in string.gmatch(logged, '%d+') do
    if epoch then seqs[#seqs + 1] = part else epoch = part end
  end
  return deliver(seqs, tonumber(epoch) < tonumber(ARGV[1]) and 1 or 0)
end
if number('ended') == 1 then return {'ENDED'} end

local wanted, version, bound = number('groups_per_step'), tonumber(ARGV[2]), number('max_staleness')
local picked = {}
while #picked < wanted do
  local seq = redis.call('ZRANGE', key('order'), #picked, #picked)[1]
  if not seq or not redis.call('ZSCORE', key('ready'), seq) then
    return {'WAIT', redis.call('ZCARD', key('ready')), wanted}
  end
  if version - tonumber(redis.call('HGET', key('oldest'), seq)) > bound then
    discard(seq, 'stale')
  else
    picked[#picked + 1] = seq
  end
end
for _, seq in ipairs(picked) do
  redis.call('ZREM', key('order'), seq)
  redis.call('ZREM', key('ready'), seq)
  redis.call('ZADD', key('taken'), seq, seq)
end
redis.call('HSET', key('log'), version, ARGV[1] .. ':' .. table.concat(picked, ','))
return deliver(picked, 0)

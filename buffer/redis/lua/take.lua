#!lua flags=allow-oom
-- READY -> TAKEN for the P lowest open sequences, all or nothing. ARGV[2], ARGV[3]: epoch, version.
-- Returns {'ok', replayed, seq, ...}, {'wait', ms}, {'fenced', epoch} or {'ended'}. A step that is in
-- the log is delivered again as it was.
local epoch, version, now = tonumber(ARGV[2]), tonumber(ARGV[3]), now_ms()
if fenced(epoch) then
  wake(WAKE_TAKE) -- the trainer that has taken over
  return {'fenced', meta('epoch')}
end

local function deliver(seqs, replayed)
  local answer = {'ok', replayed and 1 or 0}
  for _, seq in ipairs(seqs) do answer[#answer + 1] = tonumber(seq) end
  return answer
end

local first_epoch, seqs = logged(version)
if seqs then return deliver(seqs, first_epoch < epoch) end
if meta('ended') == 1 then
  wake(WAKE_TAKE)
  return {'ended'}
end
expired(now)

local size, staleness, chosen = meta('groups_per_step'), meta('max_staleness'), {}
while #chosen < size do
  local page = redis.call('ZRANGE', OPEN, #chosen, size - 1)
  if #page == 0 then return wait(now) end
  for _, seq in ipairs(page) do
    local oldest = redis.call('HGET', OLDEST, seq)
    if not oldest then return wait(now) end
    if version - oldest > staleness then
      release(seq, 'stale', 'insert')
    else
      chosen[#chosen + 1] = seq
    end
  end
end

for _, seq in ipairs(chosen) do
  redis.call('ZREM', OPEN, seq)
  redis.call('HDEL', OLDEST, seq)
  redis.call('SADD', TAKEN, seq)
end
redis.call('HSET', LOG, version, epoch .. '|' .. table.concat(chosen, ','))
return deliver(chosen, false)

#!lua flags=allow-oom
-- After: books
-- Admit nothing more: horizon 0 and no limit of the ratio. The key drained keeps what they were, for resume_admission.
-- Returns 0 if admission is stopped already.
local NO_LIMITS = {horizon = 0, min_size = 0, samples_per_insert = 1, min_diff = -1e15, max_diff = 1e15}
local drained, kept = ARGV[1] .. 'drained', {}
if redis.call('EXISTS', drained) == 1 and meta('horizon') == 0 then return 0 end
for name, value in pairs(NO_LIMITS) do
  kept[name] = dial(name)
  redis.call('HSET', META, name, string.format('%.0f', value))
end
redis.call('SET', drained, cjson.encode(kept))
wake(WAKE_ADMIT)
wake(WAKE_TAKE)
return 1

#!lua flags=allow-oom
-- Requires: state
-- Admit nothing more: set horizon 0 and no limit of the ratio, so that the groups that exist can still be trained. The
-- key `drained` saves the former values for resume_admission. Returns 0 if admission is stopped already.
local STOPPED = {horizon = 0, min_size = 0, samples_per_insert = 1, min_diff = -1e15, max_diff = 1e15}
local drained_key = ARGV[1] .. 'drained'
if redis.call('EXISTS', drained_key) == 1 and meta_number('horizon') == 0 then return 0 end

local saved = {}
for name, value in pairs(STOPPED) do
  saved[name] = meta_text(name)
  redis.call('HSET', META, name, string.format('%.0f', value))
end
redis.call('SET', drained_key, cjson.encode(saved))
wake_waiter(WAKE_ADMIT)
wake_waiter(WAKE_TAKE)
return 1

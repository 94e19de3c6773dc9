#!lua flags=allow-oom
-- Requires: state
-- Undo stop_admission. Returns 0 if admission was not stopped, or if the policy was updated since.
local drained_key = ARGV[1] .. 'drained'
local saved_text = redis.call('GET', drained_key)
redis.call('UNLINK', drained_key)
if not saved_text or meta_number('horizon') ~= 0 then return 0 end

local saved = cjson.decode(saved_text)
for name, value in pairs(saved.rate or {}) do
  saved[name] = value -- earlier releases nested the fields of the rate
end
saved.rate = nil
for name, value in pairs(saved) do
  redis.call('HSET', META, name, value)
end
wake_waiter(WAKE_ADMIT)
wake_waiter(WAKE_TAKE)
return 1

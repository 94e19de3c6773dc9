#!lua flags=allow-oom
-- After: books
-- Undo stop_admission. Returns 0 if admission was not stopped, or the run was retuned since.
local drained = ARGV[1] .. 'drained'
local note = redis.call('GET', drained)
redis.call('UNLINK', drained)
if not note or meta('horizon') ~= 0 then return 0 end
local kept = cjson.decode(note)
for name, value in pairs(kept.rate or {}) do kept[name] = value end -- as earlier releases wrote it
kept.rate = nil
for name, value in pairs(kept) do redis.call('HSET', META, name, value) end
wake(WAKE_ADMIT)
wake(WAKE_TAKE)
return 1

-- Lua's stack holds some thousands of values, so they are unpacked a page at a time: an even number, so that pairs stay
-- together.
local PAGE = 1000

-- One command for many values: call(command, key, value, ...), a page at a time.
local function call_with(command, key, values)
  for first = 1, #values, PAGE do
    redis.call(command, key, unpack(values, first, math.min(first + PAGE - 1, #values)))
  end
end

local function unlink(keys)
  for first = 1, #keys, PAGE do redis.call('UNLINK', unpack(keys, first, math.min(first + PAGE - 1, #keys))) end
end

-- Defines PAGE, call_with_values, unlink_keys.

-- Lua's stack holds some thousands of values, so long lists are unpacked one page at a time. The size is even, so that
-- pairs stay together.
local PAGE = 1000

-- One command for many values: call(command, key, value, ...), one page at a time.
local function call_with_values(command, key, values)
  for first = 1, #values, PAGE do
    redis.call(command, key, unpack(values, first, math.min(first + PAGE - 1, #values)))
  end
end

local function unlink_keys(keys)
  for first = 1, #keys, PAGE do
    redis.call('UNLINK', unpack(keys, first, math.min(first + PAGE - 1, #keys)))
  end
end

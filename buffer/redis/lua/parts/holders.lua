-- Defines is_life_of.

-- True if the holder is the server `name` in a life up to `last_life`: is_life_of in holders.py.
local function is_life_of(holder, name, last_life)
  local server, life = holder:match('^(.*)/(%d+)$')
  return server == name and tonumber(life) <= last_life
end

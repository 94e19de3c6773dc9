local function records_of(seqs)
  local records = {}
  for first = 1, #seqs, PAGE do
    local page = redis.call('HMGET', GROUPS, unpack(seqs, first, math.min(first + PAGE - 1, #seqs)))
    for _, text in ipairs(page) do records[#records + 1] = parsed(text) end
  end
  return records
end

local function store(seqs, records)
  local values = {}
  for i, seq in ipairs(seqs) do
    values[2 * i - 1], values[2 * i] = seq, printed(records[i])
  end
  call_with('HSET', GROUPS, values)
end

-- Defines read_records, write_records.

local function read_records(seqs)
  local records = {}
  for first = 1, #seqs, PAGE do
    local page = redis.call('HMGET', GROUPS, unpack(seqs, first, math.min(first + PAGE - 1, #seqs)))
    for _, text in ipairs(page) do
      records[#records + 1] = parse_record(text)
    end
  end
  return records
end

local function write_records(seqs, records)
  local values = {}
  for i, seq in ipairs(seqs) do
    values[2 * i - 1] = seq
    values[2 * i] = format_record(records[i])
  end
  call_with_values('HSET', GROUPS, values)
end

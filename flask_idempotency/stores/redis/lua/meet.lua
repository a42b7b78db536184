-- The records that an index names, without their answers, and the time.
--
-- KEYS: as in indexed.lua
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 '1' for those in flight, '3' for those in quarantine; then
--   the names of the records
-- Returns {now, and of each of the records what there is of it before the answer, '' if it is not in this state}

local state = tonumber(ARGV[2])

local met = { now }
for i = 3, #KEYS do
  local bytes, record = indexed(state, ARGV[i], KEYS[i])
  if record and state == QUARANTINED then
    local size, at = length_at(bytes, record.head + 1)
    bytes = beginning(KEYS[i], bytes, size and at + size or #bytes + 1)
  end
  met[i - 1] = bytes or ''
end
return met

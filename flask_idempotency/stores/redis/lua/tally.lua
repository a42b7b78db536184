-- The counted records of one tenant that are completed and whose life has not ended. Writes nothing.
--
-- KEYS: records of its partition
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 tid
-- Returns {edge in ms, bytes} of each, one after the other

local tid = ARGV[2]

local found = {}
for _, key in ipairs(KEYS) do
  local bytes = glance(key)
  local record = bytes and parsed(bytes)
  if record and record.counted and record.state == COMPLETED and string.sub(bytes, 62, 77) == tid then
    if not expired(record) then
      found[#found + 1] = record.deadline
      found[#found + 1] = byte_size(bytes, record.head + 1)
    end
  end
end
return found

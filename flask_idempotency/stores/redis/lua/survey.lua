-- The completed ones of some records, without their answers, and the time. Writes nothing.
--
-- KEYS: records
-- ARGV: 1 now in microseconds, or '' for the server's own time
-- Returns {now, and of each of the records its length, and what there is of it before the answer, '' if it is not completed}

local found = { now }
for i, key in ipairs(KEYS) do
  local bytes, length = glance(key), 0
  local record = bytes and parsed(bytes)
  if record and record.state == COMPLETED then
    length = #bytes < GLANCE and #bytes or redis.call('STRLEN', key)
    bytes = beginning(key, bytes, record.head + 1)
  else
    bytes = ''
  end
  found[2 * i], found[2 * i + 1] = length, bytes
end
return found

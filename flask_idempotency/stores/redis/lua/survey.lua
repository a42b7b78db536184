-- Some records of a partition, and the time. Writes nothing.
--
-- KEYS: records
-- ARGV: 1 now in microseconds, or '' for the server's own time
-- Returns {now, and each of the records, '' where there is none}

local found = { now }
for i, key in ipairs(KEYS) do
  local bytes = redis.pcall('GET', key)
  found[i + 1] = type(bytes) == 'string' and bytes or ''
end
return found

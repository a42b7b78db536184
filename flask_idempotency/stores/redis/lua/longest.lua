-- For how long the first of some quarantined records' leases has been over. Writes nothing.
--
-- KEYS: records
-- ARGV: 1 now in microseconds, or '' for the server's own time
-- Returns microseconds, 0 where none is over

local longest = 0
for _, key in ipairs(KEYS) do
  local bytes = redis.pcall('GETRANGE', key, 0, HEADER - 1)
  if type(bytes) == 'string' and #bytes == HEADER and math.floor(string.byte(bytes, 1) / 8) % 4 == QUARANTINED then
    longest = math.max(longest, now - number(bytes, 49, 54) * 1000)
  end
end
return longest

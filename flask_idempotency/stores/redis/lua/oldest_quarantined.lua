-- Return how long ago the first lease of these quarantined records ended. Read-only.
--
-- KEYS: records...
-- ARGV: 1 now
-- Returns: microseconds, 0 if no lease has ended
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/record

local now = time_now(ARGV[1])

local longest = 0
for _, key in ipairs(KEYS) do
  local bytes = redis.pcall('GETRANGE', key, 0, HEADER - 1)
  if type(bytes) == 'string' and #bytes == HEADER and math.floor(string.byte(bytes, 1) / 8) % 4 == QUARANTINED then
    longest = math.max(longest, now - read_number(bytes, 49, 54) * 1000)
  end
end
return longest

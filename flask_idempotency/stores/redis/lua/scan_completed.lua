-- Read the completed ones of some records, without their payloads. Read-only.
--
-- KEYS: records...
-- ARGV: 1 now
-- Returns: {now in microseconds, then of each record its length, and its bytes before the payload, '' if not completed}
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/head

local found = { time_now(ARGV[1]) }
for i, key in ipairs(KEYS) do
  local bytes, record = read_head(key)
  local length = 0
  if record and record.state == COMPLETED then
    length = #bytes < HEAD and #bytes or redis.call('STRLEN', key)
    bytes = without_payload(key, bytes, record.head + 1)
  else
    bytes = ''
  end
  found[2 * i], found[2 * i + 1] = length, bytes
end
return found

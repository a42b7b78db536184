-- Read the records that an index names, without their payloads.
--
-- KEYS: 1 in_flight, 2 quarantine, then records of the partition...
-- ARGV: 1 now, 2 state: '1' in flight or '3' quarantined, then the names of the records...
-- Returns: {now in microseconds, then of each record its bytes before the payload, '' if it has another state}
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/index

local now, state = time_now(ARGV[1]), tonumber(ARGV[2])

local found = { now }
for i = 3, #KEYS do
  local bytes, record = indexed_record(KEYS[1], KEYS[2], state, ARGV[i], KEYS[i], now)
  if record and state == QUARANTINED then
    local size, at = length_at(bytes, record.head + 1)
    bytes = without_payload(KEYS[i], bytes, size and at + size or #bytes + 1)
  end
  found[i - 1] = bytes or ''
end
return found

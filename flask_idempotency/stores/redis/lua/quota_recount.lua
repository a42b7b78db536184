-- Find the completed records that a tenant's quota must count. Read-only.
--
-- KEYS: records of its partition...
-- ARGV: 1 now, 2 tid
-- Returns: {bucket end in ms, bytes} of each record, one after the other
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/head
-- @include lib/response

local now, tid = time_now(ARGV[1]), ARGV[2]

local found = {}
for _, key in ipairs(KEYS) do
  local bytes = read_head(key)
  local record = bytes and parse_record(bytes)
  if record and record.counted and record.state == COMPLETED and string.sub(bytes, 62, 77) == tid then
    if not is_expired(record, now) then
      found[#found + 1] = record.deadline
      found[#found + 1] = counted_size(bytes, record.head + 1)
    end
  end
end
return found

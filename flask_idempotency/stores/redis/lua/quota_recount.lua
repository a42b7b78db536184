-- Find the completed records that a tenant's quota must count. Read-only.
--
-- KEYS: records of its partition...
-- ARGV: 1 now, 2 tid
-- Returns: {bucket end in ms, records, bytes} of each bucket that a record counts in, one after the other
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/head
-- @include lib/remembered
-- @include lib/response

local now, tid = time_now(ARGV[1]), ARGV[2]

local found = {}
local function count(bucket_end, records, size)
  found[#found + 1] = bucket_end
  found[#found + 1] = records
  found[#found + 1] = size
end

for _, key in ipairs(KEYS) do
  local bytes, record = read_head(key)
  if record and record.counted and record.state == COMPLETED and string.sub(bytes, 62, 77) == tid then
    local till = remembered_until(record)
    local later = till and till ~= record.deadline
    if not is_expired(record, now) then
      count(record.deadline, later and 0 or 1, counted_size(bytes, record.head + 1))
    end
    if later and till * 1000 > now then
      count(till, 1, 0)
    end
  end
end
return found

-- Stands at the head of every script: the time, and a record read from one string.
-- The format is drawn in record.py. Bytes are taken apart by hand because `struct` and `bit` are not everywhere.
--
-- KEYS of every script on a record: 1 record, 2 in-flight index, 3 quarantine index, 4 partition memory,
--   and of its tenant: 5 counted records that are unsettled, 6 ledger, 7 data keys
-- ARGV of every script on a record: 1 now in microseconds, or '' for the server's own time; 2 the record's name; then its own

local PROCESSING, COMPLETED, QUARANTINED = 1, 2, 3
local FORMAT, HEADER = 1, 77
-- In bytes and in ms, as in record.py: what is longer, or ends behind the year 9999, was not written by us.
local LARGEST, LATEST = 68681728, 253402300799000

-- In microseconds. What follows is straight code where it can be: to make a function takes every script a while.
local now = tonumber(ARGV[1])

if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local function number(bytes, first, last)
  local n = 0
  for _, byte in ipairs({ string.byte(bytes, first, last) }) do
    n = n * 256 + byte
  end
  return n
end

-- What every script on a record looks at; the rest stays in `bytes`. nil for what this release did not write: also an
-- answer whose life ended before it began. One flipped bit makes such a deadline, and the payment would run again.
local function parsed(bytes)
  if #bytes < HEADER + 3 or #bytes > LARGEST then
    return nil
  end
  local first = string.byte(bytes, 1)
  local state = math.floor(first / 8) % 4
  -- Not by `number`: this is on every replay's path.
  local a, b, c = string.byte(bytes, HEADER + 1, HEADER + 3)
  local head = HEADER + 3 + a * 65536 + b * 256 + c
  local d1, d2, d3, d4, d5, d6 = string.byte(bytes, 49, 54)
  local deadline = ((((d1 * 256 + d2) * 256 + d3) * 256 + d4) * 256 + d5) * 256 + d6
  if math.floor(first / 32) ~= FORMAT or state == 0 or #bytes < head or deadline > LATEST then
    return nil
  end
  if state == COMPLETED then
    local r1, r2, r3, r4, r5, r6 = string.byte(bytes, 43, 48)
    local t1, t2, t3, t4, t5 = string.byte(bytes, 55, 59)
    local requested = ((((r1 * 256 + r2) * 256 + r3) * 256 + r4) * 256 + r5) * 256 + r6
    if deadline < requested + (((t1 * 256 + t2) * 256 + t3) * 256 + t4) * 256 + t5 then
      return nil
    end
  end
  return {
    bytes = bytes,
    head = head,
    state = state,
    takeover = math.floor(first / 4) % 2 == 1,
    counted = first % 2 == 1,
    token = string.sub(bytes, 2, 17),
    fingerprint = string.sub(bytes, 26, 42),
    deadline = deadline,
  }
end

local function requested(record)
  return number(record.bytes, 43, 48)
end

local function expired(record)
  return record.state == COMPLETED and record.deadline * 1000 <= now
end


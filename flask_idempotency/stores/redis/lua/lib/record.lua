-- Reads a record from its one string. redis/encoding.py draws the format.
-- The bytes are taken apart by hand, because not every server offers `struct` and `bit`.

local PROCESSING, COMPLETED, QUARANTINED = 1, 2, 3
local FORMAT, HEADER = 1, 77
-- The fingerprint of a voided key, as engine/model.py has it. No request has it.
local VOIDED = '\0voided\0\0\0\0\0\0\0\0\0\0'
-- In bytes and in ms, as in encoding.py. We write no longer record and no time after the year 9999.
local LARGEST, LATEST = 68681728, 253402300799000

-- Return the big-endian number in these bytes.
local function read_number(bytes, first, last)
  local n, all = 0, { string.byte(bytes, first, last) }
  for at = 1, #all do
    n = n * 256 + all[at]
  end
  return n
end

-- Return what the scripts need of a record; the other fields stay in `bytes`. Return nil if this release did not write it.
-- That includes a response whose life ends before it began: one flipped bit makes such a deadline, and without this check
-- the payment would run again.
local function parse_record(bytes)
  if #bytes < HEADER + 3 or #bytes > LARGEST then
    return nil
  end
  local first = string.byte(bytes, 1)
  local state = math.floor(first / 8) % 4
  -- Without read_number: each replay runs these lines.
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

-- Return when the client sent the request, in ms.
local function requested_at(record)
  return read_number(record.bytes, 43, 48)
end

-- Time ends a completed record and no other.
local function is_expired(record, now)
  return record.state == COMPLETED and record.deadline * 1000 <= now
end

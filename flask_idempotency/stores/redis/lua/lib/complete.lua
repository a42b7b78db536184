-- A record with its response.
-- @include lib/length
-- @include lib/write
-- @include lib/remembered

local LONGEST_DURATION = 2 ^ 40 - 1

local function length_bytes(n)
  local bytes = ''
  while n > 127 do
    bytes = bytes .. string.char(n % 128 + 128)
    n = math.floor(n / 128)
  end
  return bytes .. string.char(n)
end

-- Make the record one that is remembered until then, in ms; nil: that ends with its response. Return false if its texts
-- cannot be read.
local function remember_until(record, till)
  local at = HEADER + 4
  local size, text = length_at(record.bytes, at)
  for _ = 1, 3 do
    at = size and text + size
    if not at then
      return false
    end
    size, text = length_at(record.bytes, at)
  end
  if not size or text + size - 1 ~= record.head then
    return false
  end
  local last = string.sub(record.bytes, text, record.head - (remembered_until(record) and UNTIL_SIZE or 0))
  last = last .. (till and UNTIL .. string.format('%015.0f', till) or '')
  local texts = string.sub(record.bytes, HEADER + 4, at - 1) .. length_bytes(#last) .. last
  record.bytes = string.sub(record.bytes, 1, HEADER) .. big_endian(#texts, 3) .. texts
  record.head = #record.bytes
  return true
end

-- Return the completed record, its deadline in ms and its time to live in ms. `unit` is what the deadline is a multiple of,
-- in ms: all responses that a quota counts in one bucket end together, so that none is counted down alone. With `remember`,
-- in microseconds, also return until when the record is remembered, as a multiple of its own unit. Return nil for a record
-- whose texts cannot be read.
local function completed(record, unit, keep, succeeded, status, payload, now, remember, remember_unit)
  local requested = requested_at(record)
  -- Round up, so that no response ends early. Count from the request if the clock was set back since: a life that ends
  -- before it began counts as damage.
  local deadline = math.ceil((math.max(now, requested * 1000) + keep) / (unit * 1000)) * unit
  -- A clock that was set back would make it negative.
  local duration = math.min(math.max(math.floor(now / 1000) - requested, 0), LONGEST_DURATION)
  local till, ends = nil, deadline
  if remember then
    till = math.ceil((math.max(now, requested * 1000) + remember) / (remember_unit * 1000)) * remember_unit
    till = math.max(till, deadline)
    -- The release before refuses an expired record that Redis would still keep for longer than this.
    ends = till + 5000
  end
  if (till or remembered_until(record)) and not remember_until(record, till) then
    return nil
  end
  local first = first_byte(COMPLETED, record.takeover, succeeded, record.counted)
  local bytes = rewritten(record, first, deadline, big_endian(duration, 5) .. big_endian(status, 2), payload)
  return bytes, deadline, decimal(math.ceil(ends - now / 1000) + AFTERLIFE), till
end

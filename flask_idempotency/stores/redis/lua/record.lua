-- Stands at the head of every script: the time, and a record read from and written to one string.
-- The format is drawn in record.py. Bytes are taken apart by hand because `struct` and `bit` are not everywhere.
--
-- KEYS of every script on a record: 1 record, 2 in-flight index, 3 quarantine index, 4 partition memory,
--   and of its tenant: 5 counted records that are unsettled, 6 ledger, 7 data keys
-- ARGV of every script on a record: 1 now in microseconds, or '' for the server's own time; 2 the record's name; then its own

local PROCESSING, COMPLETED, QUARANTINED = 1, 2, 3
local FORMAT, HEADER = 1, 77
local LONGEST_DURATION = 2 ^ 40 - 1
-- From here on Lua's numbers skip some: two claims would get the same fence.
local HIGHEST_FENCE = 2 ^ 53 - 1
-- More is counted as this much: sums of it stay whole.
local LARGEST_COUNTED = 2 ^ 40
local NO_RESULT = string.rep('\0', 7)

-- tostring would round a number this long: 1.7951869300405e+15.
local function decimal(n)
  return string.format('%.0f', n)
end

local function number(bytes, first, last)
  local n = 0
  for _, byte in ipairs({ string.byte(bytes, first, last) }) do
    n = n * 256 + byte
  end
  return n
end

local function digits(n, width)
  local out = {}
  for i = width, 1, -1 do
    local digit = n % 256
    out[i] = digit
    n = (n - digit) / 256
  end
  return string.char(unpack(out))
end

local function now_us()
  if ARGV[1] ~= '' then
    return tonumber(ARGV[1])
  end
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Up, so that nothing ends before its time.
local function ms_after(now, us)
  return math.ceil((now + us) / 1000)
end

-- A length as record.py writes it, and where what follows begins: seven bits in each byte, the lowest first.
local function length_at(bytes, at)
  local n, unit = 0, 1
  for last = at, at + 8 do
    local byte = string.byte(bytes, last)
    if not byte then
      return nil
    end
    n = n + byte % 128 * unit
    if byte < 128 then
      return n, last + 1
    end
    unit = unit * 128
  end
  return nil
end

-- What every script looks at; the rest stays in `bytes`. nil for what this release did not write.
local function parsed(bytes)
  if #bytes < HEADER + 3 then
    return nil
  end
  local first = string.byte(bytes, 1)
  local state = math.floor(first / 8) % 4
  local head = HEADER + 3 + number(bytes, HEADER + 1, HEADER + 3)
  if math.floor(first / 32) ~= FORMAT or state == 0 or #bytes < head then
    return nil
  end
  return {
    bytes = bytes,
    head = head,
    state = state,
    takeover = math.floor(first / 4) % 2 == 1,
    counted = first % 2 == 1,
    token = string.sub(bytes, 2, 17),
    fingerprint = string.sub(bytes, 26, 42),
    deadline = number(bytes, 49, 54),
  }
end

local function fence(record)
  return number(record.bytes, 18, 24)
end

local function attempt(record)
  return string.byte(record.bytes, 25)
end

local function requested(record)
  return number(record.bytes, 43, 48)
end

local function success(record)
  return math.floor(string.byte(record.bytes, 1) / 2) % 2 == 1
end

local function tail(record)
  return string.sub(record.bytes, record.head + 1)
end

-- What a completed record counts as; nothing where that cannot be read.
local function byte_size(record)
  return math.min(length_at(record.bytes, record.head + 1) or 0, LARGEST_COUNTED)
end

local function first_byte(state, takeover, succeeded, counted)
  return string.char(
    FORMAT * 32 + state * 8 + (takeover and 4 or 0) + (succeeded and 2 or 0) + (counted and 1 or 0)
  )
end

-- The same record with other state, deadline (in ms), result (duration and status, 7 bytes) and tail.
local function rewritten(record, first, deadline, result, rest)
  local bytes = record.bytes
  return first
    .. string.sub(bytes, 2, 48)
    .. digits(deadline, 6)
    .. result
    .. string.sub(bytes, 62, record.head)
    .. rest
end

local function expired(record, now)
  return record.state == COMPLETED and record.deadline * 1000 <= now
end

-- The record when this token may write to it, else nil and the word to answer with.
local function owned(token, now)
  local bytes = redis.call('GET', KEYS[1])
  if not bytes then
    return nil, 'ABSENT'
  end
  local record = parsed(bytes)
  if not record then
    return nil, 'CORRUPT'
  end
  if expired(record, now) then
    return nil, 'ABSENT'
  end
  if record.token ~= token then
    return nil, 'LOST'
  end
  return record
end

-- An error of type must come before the first write.
local function expect_sorted_set(key)
  redis.call('ZCARD', key)
end

-- A Redis that is out of memory refuses a script's *first* write if that write could need some, and then lets the
-- script end. Whoever owns a record must be able to settle it: such a script begins with a write that needs none.
-- ZREM is one and comes first also because a key of another type makes it fail, before anything was written.
local function leave_indexes(record, name)
  if record.counted then
    expect_sorted_set(KEYS[5])
  end
  redis.call('ZREM', record.state == PROCESSING and KEYS[2] or KEYS[3], name)
  if record.counted then
    redis.call('ZREM', KEYS[5], name)
  end
end

-- For a record that stays in its index: another write that needs no memory. It changes nothing, there is no TTL.
local function write_even_when_full()
  redis.call('PERSIST', KEYS[1])
end

-- `reason` with its length before it.
local function quarantine(record, name, now, reason)
  expect_sorted_set(KEYS[3])
  if record.counted then
    expect_sorted_set(KEYS[5])
  end
  redis.call('ZREM', KEYS[2], name)
  local first = first_byte(QUARANTINED, record.takeover, false, record.counted)
  redis.call('SET', KEYS[1], rewritten(record, first, record.deadline, NO_RESULT, reason))
  redis.call('ZADD', KEYS[3], decimal(math.floor(now / 1000)), name)
  if record.counted then
    redis.call('ZADD', KEYS[5], '0', name)
  end
end


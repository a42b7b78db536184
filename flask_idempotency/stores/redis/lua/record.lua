-- Stands at the head of every script: the time, and a record read from and written to one string.
-- The format is drawn in record.py. Bytes are taken apart by hand because `struct` and `bit` are not everywhere.
--
-- KEYS of every script on a record: 1 record, 2 in-flight index, 3 quarantine index, 4 partition memory
-- ARGV of every script on a record: 1 now in microseconds, or '' for the server's own time; 2 the record's name; then its own

local PROCESSING, COMPLETED, QUARANTINED = 1, 2, 3
local FORMAT, HEADER = 1, 61
local LONGEST_DURATION = 2 ^ 40 - 1
-- From here on Lua's numbers skip some: two claims would get the same fence.
local HIGHEST_FENCE = 2 ^ 53 - 1
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

-- What every script looks at; the rest stays in `bytes`. nil for what this release did not write.
local function parsed(bytes)
  if #bytes < HEADER + 3 then
    return nil
  end
  local first = string.byte(bytes, 1)
  local state = math.floor(first / 4) % 4
  local head = HEADER + 3 + number(bytes, HEADER + 1, HEADER + 3)
  if math.floor(first / 16) ~= FORMAT or state == 0 or #bytes < head then
    return nil
  end
  return {
    bytes = bytes,
    head = head,
    state = state,
    takeover = math.floor(first / 2) % 2 == 1,
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

local function first_byte(state, takeover, success)
  return string.char(FORMAT * 16 + state * 4 + (takeover and 2 or 0) + (success and 1 or 0))
end

-- The same record with other state, deadline (in ms), result (duration and status, 7 bytes) and tail.
local function rewritten(record, first, deadline, result, tail)
  local bytes = record.bytes
  return first
    .. string.sub(bytes, 2, 48)
    .. digits(deadline, 6)
    .. result
    .. string.sub(bytes, HEADER + 1, record.head)
    .. tail
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

-- A Redis that is out of memory refuses a script's *first* write if that write could need some, and then lets the
-- script end. Whoever owns a record must be able to settle it: such a script begins with a write that needs none.
-- ZREM is one and comes first also because a key of another type makes it fail, before anything was written.
local function leave_index(record, name)
  redis.call('ZREM', record.state == PROCESSING and KEYS[2] or KEYS[3], name)
end

-- For a record that stays in its index: another write that needs no memory. It changes nothing, there is no TTL.
local function write_even_when_full()
  redis.call('PERSIST', KEYS[1])
end

local function quarantine(record, name, now, reason)
  redis.call('ZCARD', KEYS[3]) -- An error of type must come before the first write.
  leave_index(record, name)
  local first = first_byte(QUARANTINED, record.takeover, false)
  redis.call('SET', KEYS[1], rewritten(record, first, record.deadline, NO_RESULT, reason))
  redis.call('ZADD', KEYS[3], decimal(math.floor(now / 1000)), name)
end


-- Stands at the head of every script: the time, and a record read from and written to one string.
-- The format is drawn in record.py. Bytes are taken apart by hand because `struct` and `bit` are not everywhere.
--
-- KEYS of every script: 1 record, 2 in-flight index, 3 quarantine index, 4 partition memory
-- ARGV of every script: 1 now in microseconds, or '' for the server's own time; 2 the record's name; then its own

local PROCESSING, COMPLETED, QUARANTINED = 1, 2, 3
local FORMAT, HEADER = 1, 61
local LONGEST_DURATION = 2 ^ 40 - 1

-- tostring would round a number this long: 1.7951869300405e+15.
local function decimal(n)
  return string.format('%.0f', n)
end

local function number(bytes, at, width)
  local n = 0
  for i = at, at + width - 1 do
    n = n * 256 + string.byte(bytes, i)
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

-- nil for what this release did not write.
local function parsed(bytes)
  if #bytes < HEADER + 3 then
    return nil
  end
  local first = string.byte(bytes, 1)
  local state = math.floor(first / 4) % 4
  local tail = HEADER + 3 + number(bytes, HEADER + 1, 3)
  if math.floor(first / 16) ~= FORMAT or state == 0 or #bytes < tail then
    return nil
  end
  return {
    state = state,
    takeover = math.floor(first / 2) % 2,
    success = first % 2,
    token = string.sub(bytes, 2, 17),
    fence = number(bytes, 18, 7),
    attempt = string.byte(bytes, 25),
    fingerprint = string.sub(bytes, 26, 42),
    requested = number(bytes, 43, 6),
    deadline = number(bytes, 49, 6),
    duration = number(bytes, 55, 5),
    status = number(bytes, 60, 2),
    about = string.sub(bytes, HEADER + 1, tail),
    tail = string.sub(bytes, tail + 1),
  }
end

local function written(record)
  return string.char(FORMAT * 16 + record.state * 4 + record.takeover * 2 + record.success)
    .. record.token
    .. digits(record.fence, 7)
    .. string.char(record.attempt)
    .. record.fingerprint
    .. digits(record.requested, 6)
    .. digits(record.deadline, 6)
    .. digits(record.duration, 5)
    .. digits(record.status, 2)
    .. record.about
    .. record.tail
end

local function expired(record, now)
  return record.state == COMPLETED and record.deadline * 1000 <= now
end

-- An error of type here is an error before anything was written.
local function check_indexes()
  redis.call('ZCARD', KEYS[2])
  redis.call('ZCARD', KEYS[3])
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
  check_indexes()
  return record
end

-- A Redis that is out of memory refuses a script's *first* write if that write could need some, and then lets the
-- script end. Whoever owns a record must be able to settle it, so this comes first: a write that needs none.
local function write_even_when_full()
  redis.call('PERSIST', KEYS[1])
end

local function quarantine(record, name, now, reason)
  write_even_when_full()
  record.state = QUARANTINED
  record.tail = reason
  redis.call('SET', KEYS[1], written(record))
  redis.call('ZREM', KEYS[2], name)
  redis.call('ZADD', KEYS[3], decimal(math.floor(now / 1000)), name)
end


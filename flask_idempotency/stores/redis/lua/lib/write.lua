-- Writes a record as one string, and takes it out of the indexes.
-- @include lib/number
-- @include lib/record

-- In ms. Redis drops a response this long after its deadline. The deadline decides; this covers the gap between clocks.
local AFTERLIFE = 60000
-- A reason with its length before it: the lease ended without a word from the worker.
local LEASE_EXPIRED = '\13lease-expired'
local NO_RESULT = string.rep('\0', 7)

local function first_byte(state, takeover, succeeded, counted)
  return string.char(
    FORMAT * 32 + state * 8 + (takeover and 4 or 0) + (succeeded and 2 or 0) + (counted and 1 or 0)
  )
end

-- Return the record with another state, deadline (in ms), result (duration and status, 7 bytes) and tail.
local function rewritten(record, first, deadline, result, tail)
  local bytes = record.bytes
  return first
    .. string.sub(bytes, 2, 48)
    .. big_endian(deadline, 6)
    .. result
    .. string.sub(bytes, 62, record.head)
    .. tail
end

-- Fail if an index of unfinished records has a wrong type. Call this before the first write.
local function check_indexes(keys, record)
  redis.call('ZCARD', keys[2])
  redis.call('ZCARD', keys[3])
  if record.counted then
    redis.call('ZCARD', keys[5])
  end
end

-- Put a record in flight into the indexes, or move it there to another deadline, in ms.
local function enter_in_flight(keys, record, name, deadline)
  redis.call('ZADD', keys[2], decimal(deadline), name)
  if record.counted then
    redis.call('ZADD', keys[5], decimal(deadline), name)
  end
end

-- Take an unfinished record out of the indexes.
--
-- This is the first write of a script. A Redis that is out of memory refuses a script's *first* write if that write could
-- need memory, and then lets the script end. The worker must be able to end its claim even then, so the first write is one
-- that needs no memory. ZREM is one. It also fails if the key has a wrong type, and then nothing has changed.
-- A script whose record stays in its index begins with PERSIST instead: the key has no TTL, so it changes nothing.
local function leave_indexes(keys, record, name)
  if record.counted then
    redis.call('ZCARD', keys[5]) -- A wrong type must fail before the first write.
  end
  redis.call('ZREM', record.state == PROCESSING and keys[2] or keys[3], name)
  if record.counted then
    redis.call('ZREM', keys[5], name)
  end
end

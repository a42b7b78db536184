-- What a record's owner may do to it, whatever the state of the server.

-- Set where `superseded` cannot tell before a client has looked at this process: see notice.lua.
local in_doubt = false

-- Whether somebody may have taken this record over, and been forgotten: it was granted before the memory was lost.
local function superseded(record)
  local memory = redis.call('HMGET', KEYS[4], STORE_ID, PROCESS, LINE, BEFORE, LOSSLESS)
  local _, _, changed = handed_over(memory[2], memory[3])
  in_doubt = changed and memory[5] and memory[5] == memory[2]
  return not memory[1] or changed or number(record.bytes, 18, 24) <= (tonumber(memory[4]) or 0)
end

-- The record when this token may write to it, else nil and the word to answer with.
local function owned(token)
  local bytes = redis.call('GET', KEYS[1])
  if not bytes then
    return nil, 'ABSENT'
  end
  local record = parsed(bytes)
  if not record then
    return nil, 'CORRUPT'
  end
  if expired(record) then
    return nil, 'ABSENT'
  end
  if record.token ~= token or (record.takeover and record.state ~= COMPLETED and superseded(record)) then
    return nil, in_doubt and 'DOUBT' or 'LOST'
  end
  return record
end

-- A Redis that is out of memory refuses a script's *first* write if that write could need some, and then lets the
-- script end. Whoever owns a record must be able to settle it: such a script begins with a write that needs none.
-- ZREM is one and comes first also because a key of another type makes it fail, before anything was written. For a record
-- that stays in its index it is PERSIST, which changes nothing there: there is no TTL.
local function leave_indexes(record, name)
  if record.counted then
    redis.call('ZCARD', KEYS[5]) -- An error of type must come before the first write.
  end
  redis.call('ZREM', record.state == PROCESSING and KEYS[2] or KEYS[3], name)
  if record.counted then
    redis.call('ZREM', KEYS[5], name)
  end
end


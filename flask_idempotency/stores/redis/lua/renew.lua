-- Lets a lease end later, never sooner.
--
-- ARGV: 3 token, 4 lease in microseconds
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT'

local name, token, lease = ARGV[2], ARGV[3], tonumber(ARGV[4])

local record, refusal = owned(token)
if not record then
  return refusal
end
-- Up, so that nothing ends before its time.
local deadline = math.ceil((now + lease) / 1000)
if deadline <= record.deadline then
  return 'DONE'
end
if record.state == PROCESSING then
  if record.counted then
    redis.call('ZCARD', KEYS[5])
  end
  redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
  redis.call('ZADD', KEYS[2], decimal(deadline), name)
  if record.counted then
    redis.call('ZADD', KEYS[5], decimal(deadline), name)
  end
  local first = first_byte(PROCESSING, record.takeover, awaited(record), record.counted)
  redis.call('SET', KEYS[1], rewritten(record, first, deadline, NO_RESULT, ''))
elseif record.state == QUARANTINED and string.sub(record.bytes, record.head + 1) == LAPSED then
  -- It stays what it is; but whoever would settle it sees that its owner lives.
  redis.call('PERSIST', KEYS[1])
  local first = first_byte(QUARANTINED, record.takeover, false, record.counted)
  redis.call('SET', KEYS[1], rewritten(record, first, deadline, NO_RESULT, LAPSED))
end
return 'DONE'

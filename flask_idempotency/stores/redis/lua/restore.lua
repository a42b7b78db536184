-- Puts a claim back that Redis has forgotten.
--
-- KEYS: 8 that the token was given up, 9 by which call the record was freed
-- ARGV: 3 token, 4 fence, 5 attempt, 6 fingerprint, 7 tid and about, 8 lease in microseconds; 9 how long ago it was asked
--   for, in microseconds, and 10 when memory was last lost before it was granted, in ms
-- Returns 'DONE' | 'OTHER' | 'REMEMBERED'

local name, token, fence, attempt, fingerprint, tid_and_about =
  ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7]
local lease, age, lost_before = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])

local bytes = redis.call('GET', KEYS[1])
if bytes then
  local record = parsed(bytes)
  -- What was put back is never to be taken over.
  return record and record.token == token and not record.takeover and 'DONE' or 'OTHER'
end
local memory = redis.call('HMGET', KEYS[4], FENCE, STORE_ID, PROCESS, LINE, LOST)
local asked_at = math.floor((now - age) / 1000)
local process, line, changed = handed_over(memory[3], memory[4])
if redis.call('EXISTS', KEYS[8]) == 1 or redis.call('EXISTS', KEYS[9]) == 1 then
  return 'OTHER'
end
-- Not by times: the clock may have been set since.
if memory[2] and not changed and (tonumber(memory[5]) or 0) == lost_before then
  return 'REMEMBERED'
end
local deadline = math.ceil((now + lease) / 1000)
redis.call('ZCARD', KEYS[2])
redis.call('PERSIST', KEYS[4]) -- Even when it is full: see owner.lua.
redis.call('ZADD', KEYS[2], decimal(deadline), name)
if memory[2] and changed then
  -- Nobody else has looked at this part since.
  note_loss(KEYS[4], process, line, { fence = memory[1], lost = memory[5], named = true })
end
if fence > (tonumber(memory[1]) or 0) then
  redis.call('HSET', KEYS[4], FENCE, decimal(fence))
end
-- Not counted: the ledger that it was counted in is forgotten as well.
redis.call(
  'SET',
  KEYS[1],
  first_byte(PROCESSING, false, false, false)
    .. token
    .. digits(fence, 7)
    .. string.char(attempt)
    .. fingerprint
    .. digits(asked_at, 6)
    .. digits(deadline, 6)
    .. NO_RESULT
    .. tid_and_about
)
return 'DONE'

-- Puts a claim back that Redis has forgotten.
--
-- KEYS: 8 that the token was given up, 9 by which call the record was freed
-- ARGV: 3 token, 4 fence, 5 attempt, 6 fingerprint, 7 tid and about, 8 lease in microseconds; 9 how long ago it was asked
--   for, in microseconds
-- Returns 'DONE' | 'OTHER' | 'REMEMBERED'

local name, token, fence, attempt, fingerprint, tid_and_about, lease, age =
  ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])

local bytes = redis.call('GET', KEYS[1])
if bytes then
  local record = parsed(bytes)
  return record and record.token == token and 'DONE' or 'OTHER'
end
local memory = redis.call('HMGET', KEYS[4], FENCE, STORE_ID, PROCESS, LINE, LOST)
local asked_at, lost = math.floor((now - age) / 1000), tonumber(memory[5])
local process, line, changed = handed_over(memory[3], memory[4])
if redis.call('EXISTS', KEYS[8]) == 1 or redis.call('EXISTS', KEYS[9]) == 1 then
  return 'OTHER'
end
if memory[2] and not changed and not (lost and lost >= asked_at) then
  return 'REMEMBERED'
end
local deadline = math.ceil((now + lease) / 1000)
redis.call('ZCARD', KEYS[2])
-- First the write that fails on a full Redis or on a key of another type: then nothing is written at all.
redis.call('ZADD', KEYS[2], decimal(deadline), name)
if memory[2] and changed then
  -- Nobody else has looked at this part since.
  note_loss(KEYS[4], process, line, lost)
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

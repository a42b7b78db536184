-- Lets the key run again. Nothing is granted to this token any more: a claim of it that arrives now was given up, and nobody
-- would do its work.
--
-- KEYS: 8 that the token was given up
-- ARGV: 3 token, 4 for how many milliseconds to remember that
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT'

local name, token, remembered = ARGV[2], ARGV[3], ARGV[4]

local record, refusal = owned(token)
if not record and refusal == 'CORRUPT' then
  return refusal
end
local done = record and answered(record)
if done then
  return done
end
if record then
  leave_indexes(record, name)
  redis.call('DEL', KEYS[1])
end
redis.call('PERSIST', KEYS[8]) -- Even when it is full: see owner.lua.
redis.call('SET', KEYS[8], '', 'PX', remembered)
if record then
  ring(record, name)
end
return record and 'DONE' or refusal

-- Lets the key run again.
--
-- ARGV: 3 token
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'CORRUPT'

local name, token = ARGV[2], ARGV[3]

local record, refusal = owned(token)
if not record then
  return refusal
end
local done = answered(record)
if done then
  return done
end
leave_indexes(record, name)
redis.call('DEL', KEYS[1])
return 'DONE'

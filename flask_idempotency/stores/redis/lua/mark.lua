-- From now on a lapse quarantines this record.
--
-- ARGV: 3 token
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT'

local token = ARGV[3]

local record, refusal = owned(token)
if not record then
  return refusal
end
local done = answered(record)
if done then
  return done
end
if record.state == PROCESSING and record.takeover then
  redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
  local first = first_byte(PROCESSING, false, awaited(record), record.counted)
  redis.call('SET', KEYS[1], rewritten(record, first, record.deadline, NO_RESULT, ''))
end
return 'DONE'

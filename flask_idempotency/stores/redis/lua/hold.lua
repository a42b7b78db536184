-- Quarantines a record on its owner's word.
--
-- ARGV: 3 token, 4 reason with its length before it
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT'

local name, token, reason = ARGV[2], ARGV[3], ARGV[4]

local record, refusal = owned(token)
if not record then
  return refusal
end
local done = answered(record)
if done then
  return done
end
if record.state == PROCESSING then
  quarantine(record, name, reason)
end
return 'DONE'

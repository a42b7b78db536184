-- Quarantines a completed record of which scripts can read what they need, and nobody the rest.
--
-- ARGV: 3 the record
-- Returns 'DONE' | 'OTHER'

local name, unreadable = ARGV[2], ARGV[3]

local bytes = redis.call('GET', KEYS[1])
local record = bytes == unreadable and parsed(bytes)
if not record or record.state ~= COMPLETED then
  return 'OTHER'
end
condemn(record, name)
return 'DONE'

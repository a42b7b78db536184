-- Completes a quarantined record in its owner's place. Goes on in completing.lua.
--
-- ARGV: 3 a fresh token, 4 to 9 as for complete.lua; 10 token, 11 deadline in ms and 12 state, as they were seen
-- Returns 'DONE' | 'OTHER' | 'CORRUPT' | 'ERASED' | 'KEYLESS'

local name, fresh, keep, succeeded, status, payload, key_number, width =
  ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1', tonumber(ARGV[6]), ARGV[7], ARGV[8], tonumber(ARGV[9])
local token, deadline_seen, state = ARGV[10], ARGV[11], ARGV[12]

local found = redis.call('GET', KEYS[1])
local settled = found and parsed(found)
if settled and settled.state == COMPLETED and settled.token == fresh and not expired(settled) then
  return 'DONE'
end
local record = as_seen(found, state, token, deadline_seen)
if not record or record.state ~= QUARANTINED then
  return 'OTHER'
end
-- From here on the owner's token is nobody's: it learns that it has lost its claim.
record.bytes = string.sub(found, 1, 1) .. fresh .. string.sub(found, 18)


-- Quarantines a completed record that holds this very payload.
--
-- ARGV: 3 '1' for success, 4 status, 5 byte size, seal and payload
-- Returns 'DONE' | 'OTHER'

local name, succeeded, status, payload = ARGV[2], ARGV[3] == '1', tonumber(ARGV[4]), ARGV[5]

local bytes = redis.call('GET', KEYS[1])
local record = bytes and parsed(bytes)
if not record or record.state ~= COMPLETED or expired(record) or not is_answer(record, payload, succeeded, status) then
  return 'OTHER'
end
condemn(record, name)
return 'DONE'

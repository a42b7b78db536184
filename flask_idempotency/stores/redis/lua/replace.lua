-- Puts another payload in the place of this very one, and leaves everything else.
--
-- ARGV: 3 '1' for success, 4 status, 5 byte size, seal and payload; 6, 7, 8 the same of the new one, and 9 the number of
--   the data key that this is sealed with, '0' for none
-- Returns 'DONE' | 'OTHER' | 'ERASED' | 'KEYLESS' | 'CORRUPT'

local old_success, old_status, old_payload = ARGV[3] == '1', tonumber(ARGV[4]), ARGV[5]
local new_success, new_status, new_payload, key_number = ARGV[6] == '1', tonumber(ARGV[7]), ARGV[8], ARGV[9]

local bytes = redis.call('GET', KEYS[1])
local record = bytes and parsed(bytes)
if not record or record.state ~= COMPLETED or expired(record) or not is_answer(record, old_payload, old_success, old_status) then
  return 'OTHER'
end
local no_key = key_refused(record, key_number)
if no_key then
  return no_key
end
local first = first_byte(COMPLETED, record.takeover, new_success, record.counted)
local result = string.sub(bytes, 55, 59) .. digits(new_status, 2)
redis.call('SET', KEYS[1], rewritten(record, first, record.deadline, result, new_payload), 'KEEPTTL')
return 'DONE'

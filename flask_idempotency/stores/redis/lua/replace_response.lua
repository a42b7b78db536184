-- Replace a response that is still as it was read, and leave every other field: to seal it again, or to wipe it.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys
-- ARGV: 1 now, 2 name, as it was read: 3 success: '1' or '0', 4 status, 5 size, seal and payload; the new one: 6 success,
--   7 status, 8 size, seal and payload, 9 number of its data key or '0'
-- Returns: 'DONE' | 'OTHER' | 'ERASED' | 'KEYLESS' | 'CORRUPT'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/response
-- @include lib/data_keys
-- @include lib/write

local now = time_now(ARGV[1])
local old_success, old_status, old_payload = ARGV[3] == '1', tonumber(ARGV[4]), ARGV[5]
local new_success, new_status, new_payload, key_number = ARGV[6] == '1', tonumber(ARGV[7]), ARGV[8], ARGV[9]

local bytes = redis.call('GET', KEYS[1])
local record = bytes and parse_record(bytes)
if not record or record.state ~= COMPLETED or is_expired(record, now) then
  return 'OTHER'
end
if not is_response(record, old_payload, old_success, old_status) then
  return 'OTHER'
end
local refused = data_key_refusal(KEYS[7], record, key_number)
if refused then
  return refused
end
local first = first_byte(COMPLETED, record.takeover, new_success, record.counted)
local result = string.sub(bytes, 55, 59) .. big_endian(new_status, 2)
redis.call('SET', KEYS[1], rewritten(record, first, record.deadline, result, new_payload), 'KEEPTTL')
return 'DONE'

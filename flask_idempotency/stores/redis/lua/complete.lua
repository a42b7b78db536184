-- Store the worker's response, once. A second call changes nothing.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys
-- ARGV: 1 now, 2 name, 3 token, 4 keep in microseconds, 5 success: '1' or '0', 6 status, 7 size, seal and payload,
--   8 number of the data key or '0', 9 bucket width in ms
-- Returns: 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT' | 'ERASED' | 'KEYLESS'
-- Durable: yes
-- Transitions: processing -> completed, quarantined -> completed
-- @include lib/time
-- @include lib/owner
-- @include lib/data_keys
-- @include lib/complete
-- @include lib/notify

local now, name, token = time_now(ARGV[1]), ARGV[2], ARGV[3]
local keep, succeeded, status, payload, key_number, bucket_width =
  tonumber(ARGV[4]), ARGV[5] == '1', tonumber(ARGV[6]), ARGV[7], ARGV[8], tonumber(ARGV[9])

local record, refused = owned_record(KEYS, token, now)
if not record then
  return refused
end
if record.state == COMPLETED then
  return 'DONE'
end
refused = data_key_refusal(KEYS[7], record, key_number)
if refused then
  return refused
end
-- resolve.lua has the same lines: as one function, their many upvalues cost each completion 10 % of the server's time.
local unit = record.counted and bucket_width or 1
local bytes, deadline, ttl = completed(record, unit, keep, succeeded, status, payload, now)
if record.counted then
  -- @include lib/quota_totals
  -- @include lib/response
  local usage, size = read_usage(KEYS[6], deadline), counted_size(payload, 1)
  leave_indexes(KEYS, record, name)
  add_record(KEYS[6], usage, size)
else
  leave_indexes(KEYS, record, name)
end
redis.call('SET', KEYS[1], bytes, 'PX', ttl)
notify(record, name)
return 'DONE'

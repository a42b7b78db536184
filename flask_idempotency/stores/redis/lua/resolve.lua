-- Store a response for a quarantined record in its worker's place, and remove its journal.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, 8 journal,
--   [9 index of remembered records]
-- ARGV: 1 now, 2 name, 3 new token, as they were seen: 4 token, 5 deadline in ms, 6 state; then 7 keep in microseconds,
--   8 success: '1' or '0', 9 status, 10 size, seal and payload, 11 number of the data key or '0', 12 bucket width in ms,
--   if the record outlives its response also: [13 remember in microseconds, 14 bucket width in ms]
-- Returns: 'DONE' | 'OTHER' | 'CORRUPT' | 'ERASED' | 'KEYLESS'
-- Durable: yes
-- Transitions: quarantined -> completed
-- @include lib/time
-- @include lib/snapshot
-- @include lib/data_keys
-- @include lib/complete
-- @include lib/journal
-- @include lib/notify

local now, name, new_token, token, deadline_seen, state = time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local keep, succeeded, status, payload, key_number, bucket_width =
  tonumber(ARGV[7]), ARGV[8] == '1', tonumber(ARGV[9]), ARGV[10], ARGV[11], tonumber(ARGV[12])

local found = redis.call('GET', KEYS[1])
local resolved = found and parse_record(found)
if resolved and resolved.state == COMPLETED and resolved.token == new_token and not is_expired(resolved, now) then
  return 'DONE'
end
local record = as_seen(found, state, token, deadline_seen, now)
if not record or record.state ~= QUARANTINED then
  return 'OTHER'
end
-- From here on the worker's token is worthless, and its next call fails with LeaseLost.
record.bytes = string.sub(found, 1, 1) .. new_token .. string.sub(found, 18)
local refused = data_key_refusal(KEYS[7], record, key_number)
if refused then
  return refused
end
-- complete.lua has the same lines: as one function, their many upvalues cost each completion 10 % of the server's time.
local unit, remember_unit = 1, 1
if record.counted then
  unit, remember_unit = bucket_width, tonumber(ARGV[14])
end
local bytes, deadline, ttl, till =
  completed(record, unit, keep, succeeded, status, payload, now, tonumber(ARGV[13]), remember_unit)
if not bytes then
  return 'CORRUPT'
end
if till then
  redis.call('ZCARD', KEYS[9]) -- A wrong type must fail before the first write.
end
if record.counted then
  -- @include lib/quota_totals
  -- @include lib/response
  local usage, size = read_usage(KEYS[6], deadline, till), counted_size(payload, 1)
  leave_indexes(KEYS, record, name)
  add_record(KEYS[6], usage, size)
else
  leave_indexes(KEYS, record, name)
end
close_journal(KEYS[8], KEYS[6], record)
redis.call('SET', KEYS[1], bytes, 'PX', ttl)
if till then
  redis.call('ZADD', KEYS[9], decimal(deadline), name)
end
notify(record, name)
return 'DONE'

-- Quarantine a completed record that cannot be opened. Its response stays in it.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys
-- ARGV: 1 now, 2 name, then which record is meant: 3 its bytes; or 3 '' and its response:
--   [4 success: '1' or '0', 5 status, 6 size, seal and payload]
-- Returns: 'DONE' | 'OTHER'
-- Durable: no
-- Transitions: completed -> quarantined
-- @include lib/time
-- @include lib/remembered
-- @include lib/response
-- @include lib/write

local now, name, expected = time_now(ARGV[1]), ARGV[2], ARGV[3]
local succeeded, status, payload = ARGV[4] == '1', tonumber(ARGV[5]), ARGV[6]

local bytes = redis.call('GET', KEYS[1])
local record = bytes and (expected == '' or bytes == expected) and parse_record(bytes)
if not record or record.state ~= COMPLETED then
  return 'OTHER'
end
-- A caller that has read the bytes could not decode them, and so knows neither their deadline nor their response.
if expected == '' and (is_expired(record, now) or not is_response(record, payload, succeeded, status)) then
  return 'OTHER'
end

redis.call('ZCARD', KEYS[3])
local usage
-- @include lib/quota_totals
if record.counted then
  redis.call('ZCARD', KEYS[5])
  usage = read_usage(KEYS[6], record.deadline, remembered_until(record))
end
-- First, because it needs no memory; and from here on time does not end the record.
redis.call('PERSIST', KEYS[1])
local first = first_byte(QUARANTINED, record.takeover, is_success(record), record.counted)
local result = string.sub(bytes, 55, 61)
redis.call('SET', KEYS[1], rewritten(record, first, record.deadline, result, '\7corrupt' .. response_of(record)))
redis.call('ZADD', KEYS[3], decimal(math.floor(now / 1000)), name)
if usage then
  remove_record(KEYS[6], usage, counted_size(bytes, record.head + 1))
  redis.call('ZADD', KEYS[5], '0', name)
end
return 'DONE'

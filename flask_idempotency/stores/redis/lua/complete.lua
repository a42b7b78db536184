-- Store the worker's response, once. A second call changes nothing. For a claim of an endpoint with steps, also remove the
-- journal.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, [8 journal,
--   9 index of remembered records]
-- ARGV: 1 now, 2 name, 3 token, 4 keep in microseconds, 5 success: '1' or '0', 6 status, 7 size, seal and payload,
--   8 number of the data key or '0', 9 bucket width in ms, if the record outlives its response also: [10 remember in
--   microseconds, 11 bucket width in ms]
-- Returns: 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT' | 'ERASED' | 'KEYLESS'
-- Durable: yes
-- Transitions: processing -> completed, quarantined -> completed
-- @include lib/time
-- @include lib/number
-- @layout ERASURE DISABLED CHANNEL

local now, name, token = time_now(ARGV[1]), ARGV[2], ARGV[3]
local bytes = redis.call('GET', KEYS[1])

-- fast path: a claim in flight of this token, that no other may have taken over, without steps, and that no quota counts.
-- What differs in any point is left to the rules.
local first = not KEYS[8] and not ARGV[10] and bytes and string.byte(bytes, 1)
if (first == 40 or first == 42) and #bytes >= 80 and #bytes <= 68681728 and string.sub(bytes, 2, 17) == token then
  local a, b, c = string.byte(bytes, 78, 80)
  local r1, r2, r3, r4, r5, r6, d1, d2, d3, d4, d5, d6 = string.byte(bytes, 43, 54)
  local head = 80 + a * 65536 + b * 256 + c
  local requested = ((((r1 * 256 + r2) * 256 + r3) * 256 + r4) * 256 + r5) * 256 + r6
  local lease = ((((d1 * 256 + d2) * 256 + d3) * 256 + d4) * 256 + d5) * 256 + d6
  local key = ARGV[8] ~= '0' and redis.call('HMGET', KEYS[7], ARGV[8], ERASURE, DISABLED .. ARGV[8])
  if #bytes >= head and lease <= 253402300799000 and (not key or (key[1] and not key[2] and not key[3])) then
    local deadline = math.ceil((math.max(now, requested * 1000) + ARGV[4]) / 1000)
    local duration = math.min(math.max(math.floor(now / 1000) - requested, 0), 2 ^ 40 - 1)
    redis.call('ZREM', KEYS[2], name)
    redis.call(
      'SET',
      KEYS[1],
      string.char(48 + ARGV[5] * 2)
        .. string.sub(bytes, 2, 48)
        .. big_endian(deadline, 6)
        .. big_endian(duration, 5)
        .. big_endian(ARGV[6], 2)
        .. string.sub(bytes, 62, head)
        .. ARGV[7],
      'PX',
      math.ceil(deadline - now / 1000) + 60000
    )
    if first == 42 then
      redis.pcall('PUBLISH', CHANNEL, name)
    end
    return 'DONE'
  end
end
-- end of fast path

-- @include lib/owner
-- @include lib/data_keys
-- @include lib/complete
-- @include lib/notify
local keep, succeeded, status, payload, key_number, bucket_width =
  tonumber(ARGV[4]), ARGV[5] == '1', tonumber(ARGV[6]), ARGV[7], ARGV[8], tonumber(ARGV[9])

local record, refused = owned_record(KEYS, bytes, token, now)
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
local unit, remember_unit = 1, 1
if record.counted then
  unit, remember_unit = bucket_width, tonumber(ARGV[11])
end
local deadline, ttl, till
bytes, deadline, ttl, till =
  completed(record, unit, keep, succeeded, status, payload, now, tonumber(ARGV[10]), remember_unit)
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
if KEYS[8] then
  -- @include lib/journal
  close_journal(KEYS[8], KEYS[6], record)
end
redis.call('SET', KEYS[1], bytes, 'PX', ttl)
if till then
  redis.call('ZADD', KEYS[9], decimal(deadline), name)
end
notify(record, name)
return 'DONE'

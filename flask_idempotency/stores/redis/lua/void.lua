-- Void a key that is free: from now on no request runs under it. Else return how it stands.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys
-- ARGV: 1 now, 2 bucket width in ms, 3 token, 4 keep in microseconds, 5 status, 6 size, seal and payload, 7 tid and info,
--   about data loss: 8 store_id, 9 layout, 10 rule, 11 skew_ms, 12 key_made_at_ms; with a quota also: [13 records, 14 bytes,
--   15 in_flight, 16 new_keys, 17 window], '' for no limit; without one, 13 is '-'; [18 as in claim.lua]
-- Returns: {'VOIDED' or 'MISMATCHED' or 'OTHER-CALLER', requested_at_ms} | {'CORRUPT'} | {'DATA-LOSS', kind, noticed}
--   | {'DOUBT'} | {'OVER-QUOTA', limit, allowed, room_in, window}
-- Durable: yes
-- Transitions: absent -> completed
-- @include lib/time
-- @include lib/data_loss
-- @include lib/callers
-- @include lib/complete
-- @include lib/quota
-- @include lib/response
-- @layout FENCE

local now = time_now(ARGV[1])
local bytes = redis.pcall('GET', KEYS[1])
-- A table is an error: the key has another type.
local record = type(bytes) == 'string' and parse_record(bytes)
local live = record and (not is_expired(record, now) or is_skeleton(record, now))
if live then
  if is_callers(record, ARGV) == false then
    return { 'OTHER-CALLER', requested_at(record) }
  end
  return { record.fingerprint == VOIDED and 'VOIDED' or 'MISMATCHED', requested_at(record) }
end
local loss, noticed, _, _, fence =
  data_loss_of(KEYS[4], ARGV[8], ARGV[9], ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12]), now)
if loss == 'doubt' then
  return { 'DOUBT' }
end
-- Both rules are those of claim.lua: what cannot be read is kept, and a life that ends too early is damage.
if bytes and not record then
  redis.call('PERSIST', KEYS[1])
  redis.call('ZADD', KEYS[3], decimal(math.floor(now / 1000)), string.match(KEYS[1], '[^:]+$'))
  return { 'CORRUPT' }
end
if record and ARGV[1] == '' then
  local ttl = redis.call('PTTL', KEYS[1])
  if ttl == -1 or ttl > AFTERLIFE + 5000 then
    return { 'CORRUPT' }
  end
end
if loss then
  return { 'DATA-LOSS', loss, noticed }
end
local quota
if ARGV[13] ~= '-' then
  quota = read_quota(KEYS[6], KEYS[5], { ARGV[13], ARGV[14], ARGV[15], ARGV[16], ARGV[17] }, now)
  local refusal = quota and quota_refusal(quota, KEYS[5], now)
  if not quota or refusal then
    return refusal or { 'CORRUPT' }
  end
end
local floor = fence or '0'
if not string.find(floor, '^%d+$') then
  return { 'CORRUPT' }
end
local next_fence = math.max(tonumber(floor) + 1, (record and read_number(bytes, 18, 24) or 0) + 1, now)
if next_fence > 2 ^ 53 - 1 then
  return { 'CORRUPT' }
end

-- A claim, as claim.lua would write it, that is completed before it is written.
local claim = parse_record(
  first_byte(PROCESSING, false, false, quota)
    .. ARGV[3]
    .. big_endian(next_fence, 7)
    .. string.char(1)
    .. VOIDED
    .. big_endian(math.floor(now / 1000), 6)
    .. big_endian(math.floor(now / 1000), 6)
    .. NO_RESULT
    .. ARGV[7]
)
local unit = quota and tonumber(ARGV[2]) or 1
local voided, deadline, ttl = completed(claim, unit, tonumber(ARGV[4]), false, tonumber(ARGV[5]), ARGV[6], now)
-- Do this write first: it fails if Redis is full, and then nothing has changed.
redis.call('HSET', KEYS[4], FENCE, decimal(next_fence))
redis.call('SET', KEYS[1], voided, 'PX', ttl)
if quota then
  add_key(KEYS[6], quota)
  add_record(KEYS[6], read_usage(KEYS[6], deadline), counted_size(ARGV[6], 1))
end
return { 'VOIDED', requested_at(claim) }

-- Take a key if it is free, else return how its record stands. Times are in microseconds, unless a name says ms.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, 8 cancelled
-- ARGV: 1 now, 2 name, 3 token, 4 fingerprint, 5 flags: 1 if an expired lease may be taken over and 2 if requests may wait,
--   6 tid and info, 7 lease; about data loss: 8 store_id, 9 layout, 10 rule, 11 skew_ms, 12 key_made_at_ms;
--   with a quota also: [13 records, 14 bytes, 15 in_flight, 16 new_keys, 17 window], '' for no limit
-- Returns: {'CLAIMED', fence, attempt, lease_left, lost_at_ms} | {'REPLAYED', record, now, erasure or false}
--   | {'IN-FLIGHT', lease_left} | {'MISMATCHED', requested_at_ms} | {'UNKNOWN', reason} | {'CORRUPT'} | {'CANCELLED'}
--   | {'DATA-LOSS', kind, noticed} | {'DOUBT'} | {'OVER-QUOTA', limit, allowed, room_in, window}
-- Durable: yes
-- Transitions: absent -> processing, processing -> processing, processing -> quarantined
-- @include lib/time
-- @include lib/record
-- @layout ERASURE LOST_AT

local now = time_now(ARGV[1])
local name, token, fingerprint, lease = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[7])

local bytes = redis.pcall('GET', KEYS[1])
-- A table is an error: the key has another type.
local record = type(bytes) == 'string' and parse_record(bytes)
local live = record and not is_expired(record, now)
if live and record.fingerprint ~= fingerprint then
  return { 'MISMATCHED', requested_at(record) }
end
if live and record.state == COMPLETED then
  return { 'REPLAYED', bytes, now, redis.call('HGET', KEYS[7], ERASURE) }
end
if live and record.state == PROCESSING then
  local left = record.deadline * 1000 - now
  if record.token == token then
    -- The worker sends its claim again, because it did not receive the reply.
    local lost_at = tonumber(redis.call('HGET', KEYS[4], LOST_AT) or '0')
    return { 'CLAIMED', read_number(bytes, 18, 24), string.byte(bytes, 25), math.max(left, 0), lost_at }
  end
  if left > 0 then
    return { 'IN-FLIGHT', left }
  end
end

-- Replays and conflicts have returned. Each include below costs the server time in every claim that comes so far.
-- @include lib/data_loss
-- @include lib/length
-- @include lib/quarantine

local rule = ARGV[10]
local loss, noticed, lost_at, fence_at_loss, fence =
  data_loss_of(KEYS[4], ARGV[8], ARGV[9], rule, tonumber(ARGV[11]), tonumber(ARGV[12]), now)
if loss == 'doubt' then
  return { 'DOUBT' }
end

if live and record.state == QUARANTINED then
  local size, at = length_at(bytes, record.head + 1)
  if size and at + size - 1 <= #bytes then
    return { 'UNKNOWN', string.sub(bytes, at, at + size - 1) }
  end
end
-- Keep what cannot be read, and keep it without a TTL: at the end of a TTL the key would count as absent.
if (bytes and not record) or (live and record.state == QUARANTINED) then
  redis.call('PERSIST', KEYS[1])
  redis.call('ZADD', KEYS[3], decimal(math.floor(now / 1000)), name)
  return { 'CORRUPT' }
end
-- The response has expired, but Redis would keep it for longer than complete.lua set, or for ever: a flipped bit in the
-- deadline or the state. It ends when Redis drops it. With a test's clock the two times do not compare.
if record and not live and ARGV[1] == '' then
  local ttl = redis.call('PTTL', KEYS[1])
  if ttl == -1 or ttl > AFTERLIFE + 5000 then
    return { 'CORRUPT' }
  end
end

if loss and loss ~= 'changed' and (not live or record.takeover) then
  return { 'DATA-LOSS', loss, noticed }
end
local takeover = live and record.takeover
-- The work of a claim from before a loss may be done, and its response lost: no worker takes it over.
if live and not (takeover and (rule == 'run' or read_number(bytes, 18, 24) > fence_at_loss)) then
  quarantine(KEYS, record, name, LEASE_EXPIRED, now)
  return { 'UNKNOWN', 'lease-expired' }
end
if loss and not live then
  return { 'DATA-LOSS', loss, noticed }
end

-- The key is free, or its lease expired and this claim takes it over. A takeover needs no quota: the key is counted.
local last_fence = record and read_number(bytes, 18, 24) or 0
local attempt, requested, counted = 1, math.floor(now / 1000), false
local quota, add_to_quota
if takeover then
  attempt, requested, counted = math.min(string.byte(bytes, 25) + 1, 255), requested_at(record), record.counted
elseif ARGV[13] then
  -- @include lib/quota
  quota = read_quota(KEYS[6], KEYS[5], { ARGV[13], ARGV[14], ARGV[15], ARGV[16], ARGV[17] }, now)
  if not quota then
    return { 'CORRUPT' }
  end
  local refusal = quota_refusal(quota, KEYS[5], now)
  if refusal then
    return refusal
  end
  counted, add_to_quota = true, add_key
end

if redis.call('EXISTS', KEYS[8]) == 1 then
  return { 'CANCELLED' }
end
local floor = fence or '0'
-- tonumber would also accept nan, 0x1F and 1e300.
if not string.find(floor, '^%d+$') then
  return { 'CORRUPT' }
end
-- Count from the clock and not from one: a Redis that lost its counter must not grant an old fence again.
local next_fence = math.max(tonumber(floor) + 1, last_fence + 1, now)
-- Above this Lua's numbers skip some, and two claims would get the same fence.
if next_fence > 2 ^ 53 - 1 then
  return { 'CORRUPT' }
end
if counted then
  redis.call('ZCARD', KEYS[5])
end

-- All reads and checks are done: from here on the script only writes.
-- Round up, so that no lease ends early.
local deadline = math.ceil((now + lease) / 1000)
-- Do this write first: it fails if Redis is full or the key has a wrong type, and then nothing has changed.
redis.call('ZADD', KEYS[2], decimal(deadline), name)
if counted then
  redis.call('ZADD', KEYS[5], decimal(deadline), name)
end
if add_to_quota then
  add_to_quota(KEYS[6], quota)
end
redis.call('HSET', KEYS[4], FENCE, decimal(next_fence))
-- Without PX: no claim may disappear by time.
redis.call(
  'SET',
  KEYS[1],
  first_byte(PROCESSING, ARGV[5] % 2 == 1, ARGV[5] >= '2', counted)
    .. token
    .. big_endian(next_fence, 7)
    .. string.char(attempt)
    .. fingerprint
    .. big_endian(requested, 6)
    .. big_endian(deadline, 6)
    .. NO_RESULT
    .. ARGV[6]
)
return { 'CLAIMED', next_fence, attempt, lease, lost_at or 0 }

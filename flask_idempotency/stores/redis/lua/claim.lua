-- Take a key if it is free, else return how its record stands. Times are in microseconds, unless a name says ms.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys,
--   8 cancelled, [9 journal, if an expired lease may be taken over]
-- ARGV: 1 now, 2 name, 3 token, 4 fingerprint, 5 flags: 4 if an expired lease may be taken over, and 2 if requests may wait,
--   6 tid and info, 7 lease; about data loss: 8 store_id, 9 layout, 10 rule, 11 skew_ms, 12 key_made_at_ms;
--   with a quota also: [13 records, 14 bytes, 15 in_flight, 16 new_keys, 17 window], '' for no limit; without one, 13 is '-'
--   if callers follow: [18 how many, then so many tenants and principals that show the caller, then those that show no caller]
-- Returns: {fence, lost_at_ms} of a first attempt, with the lease that it asked for
--   | {'CLAIMED', fence, attempt, lease_left, lost_at_ms, [info of the claim that this one took over]}
--   | {'REPLAYED', record, now, erasure or false}
--   | {'OTHER-CALLER', requested_at_ms} | {'CALLER-UNKNOWN'} | {'EXPIRED', requested_at_ms}
--   | {'IN-FLIGHT', lease_left} | {'MISMATCHED' or 'VOIDED', requested_at_ms} | {'UNKNOWN', reason} | {'CORRUPT'}
--   | {'CANCELLED'}
--   | {'DATA-LOSS', kind, noticed} | {'DOUBT'} | {'OVER-QUOTA', limit, allowed, room_in, window}
-- Durable: yes
-- Transitions: absent -> processing, processing -> processing, processing -> quarantined
-- @include lib/time
-- @include lib/number
-- @layout ERASURE LOST_AT FENCE STORE_ID LAYOUT REPLICATION_ID ACKED_LOSS

local now = time_now(ARGV[1])
local bytes = redis.pcall('GET', KEYS[1])
local name, token, lease = ARGV[2], ARGV[3], tonumber(ARGV[7])
-- What the writes at the end need: the rules below decide it.
local is_free, fence, lost_at
local last_fence, attempt, requested, counted = 0, 1, math.floor(now / 1000), false
local quota, add_to_quota, info_before

-- fast path: replays, and claims of a free key. What differs in any point is left to the rules.
if not bytes then
  -- Without a quota, in a partition that this store has named and this server process has written, where an operator has
  -- acknowledged the last data loss.
  local known = (not ARGV[13] or ARGV[13] == '-')
    and redis.call('HMGET', KEYS[4], FENCE, STORE_ID, LAYOUT, REPLICATION_ID, LOST_AT, ACKED_LOSS)
  local store_id = known and known[3] == ARGV[9] and known[5] == known[6] and known[2]
  if store_id and store_id ~= 'unnamed' and (store_id == ARGV[8] or ARGV[8] == '') and known[4] then
    local info = redis.pcall('INFO', 'replication')
    local replication_id = known[4] ~= '' and 'master_replid:' .. known[4] .. '\r\n'
    is_free = replication_id and type(info) == 'string' and string.find(info, replication_id, 1, true)
    fence, lost_at = known[1], tonumber(known[5])
  end
elseif not ARGV[18] and type(bytes) == 'string' and #bytes >= 80 and #bytes <= 68681728 then
  -- A completed record of this format, byte by byte as lib/record reads it.
  local first, a, b, c = string.byte(bytes, 1), string.byte(bytes, 78, 80)
  if first >= 48 and first < 56 and string.sub(bytes, 26, 42) == ARGV[4] and #bytes >= 80 + a * 65536 + b * 256 + c then
    local r1, r2, r3, r4, r5, r6, d1, d2, d3, d4, d5, d6, t1, t2, t3, t4, t5 = string.byte(bytes, 43, 59)
    local deadline = ((((d1 * 256 + d2) * 256 + d3) * 256 + d4) * 256 + d5) * 256 + d6
    local ended = ((((r1 * 256 + r2) * 256 + r3) * 256 + r4) * 256 + r5) * 256 + r6
      + (((t1 * 256 + t2) * 256 + t3) * 256 + t4) * 256 + t5
    if deadline >= ended and deadline <= 253402300799000 and deadline * 1000 > now then
      return { 'REPLAYED', bytes, now, redis.call('HGET', KEYS[7], ERASURE) }
    end
  end
end
-- end of fast path

if not is_free then
  -- @include lib/record
  -- A table is an error: the key has another type.
  local record = type(bytes) == 'string' and parse_record(bytes)
  local live = record and not is_expired(record, now)
  local skeleton = false
  if record and not live then
    -- @include lib/remembered
    skeleton = is_skeleton(record, now)
  end
  local shown = true
  if (live or skeleton) and ARGV[18] then
    -- @include lib/callers
    shown = is_callers(record, ARGV)
    if shown == false then
      return { 'OTHER-CALLER', requested_at(record) }
    end
  end
  if live and record.fingerprint == VOIDED then
    return { 'VOIDED', requested_at(record) }
  end
  if (live or skeleton) and record.fingerprint ~= ARGV[4] then
    return { 'MISMATCHED', requested_at(record) }
  end
  if skeleton then
    return { 'EXPIRED', requested_at(record) }
  end
  if live and record.state == COMPLETED then
    return { 'REPLAYED', bytes, now, redis.call('HGET', KEYS[7], ERASURE) }
  end
  if live and record.state == PROCESSING then
    local left = record.deadline * 1000 - now
    if record.token == token then
      -- The worker sends its claim again, because it did not receive the reply.
      lost_at = tonumber(redis.call('HGET', KEYS[4], LOST_AT) or '0')
      return { 'CLAIMED', read_number(bytes, 18, 24), string.byte(bytes, 25), math.max(left, 0), lost_at }
    end
    if left > 0 then
      return { 'IN-FLIGHT', left }
    end
    if shown == nil then
      return { 'CALLER-UNKNOWN' }
    end
  end

  -- Replays and conflicts have returned. Each include below costs the server time in every claim that comes so far.
  -- @include lib/data_loss
  -- @include lib/length
  -- @include lib/quarantine
  -- @layout JOURNALS

  local rule = ARGV[10]
  local loss, noticed, fence_at_loss
  loss, noticed, lost_at, fence_at_loss, fence =
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
    if takeover and KEYS[9] then
      -- @include lib/journal
      local journal, word = journal_of(KEYS[9], record)
      if journal or word == 'CORRUPT' then
        -- The journal may lack a step that has happened.
        quarantine(KEYS, record, name, MEMORY_LOST, now)
        return { 'UNKNOWN', 'memory-lost' }
      end
    end
    quarantine(KEYS, record, name, LEASE_EXPIRED, now)
    return { 'UNKNOWN', 'lease-expired' }
  end
  if loss and not live then
    return { 'DATA-LOSS', loss, noticed }
  end

  -- The key is free, or its lease expired and this claim takes it over. A takeover needs no quota: the key is counted.
  last_fence = record and read_number(bytes, 18, 24) or 0
  if takeover then
    attempt, requested, counted = math.min(string.byte(bytes, 25) + 1, 255), requested_at(record), record.counted
    info_before = string.sub(bytes, 81, record.head)
  elseif ARGV[13] and ARGV[13] ~= '-' then
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

-- All reads and checks are done: from here on the script only writes. Redis writes these numbers as whole digits.
-- Round up, so that no lease ends early.
local deadline = math.ceil((now + lease) / 1000)
-- Do this write first: it fails if Redis is full or the key has a wrong type, and then nothing has changed.
redis.call('ZADD', KEYS[2], deadline, name)
if counted then
  redis.call('ZADD', KEYS[5], deadline, name)
end
if add_to_quota then
  add_to_quota(KEYS[6], quota)
end
redis.call('HSET', KEYS[4], FENCE, next_fence)
-- Without PX: no claim may disappear by time.
redis.call(
  'SET',
  KEYS[1],
  -- Format 1, in flight; ARGV[5] has its flags where this byte has them.
  string.char(40 + ARGV[5] + (counted and 1 or 0))
    .. token
    .. big_endian(next_fence, 7)
    .. string.char(attempt)
    .. ARGV[4]
    .. big_endian(requested, 6)
    .. big_endian(deadline, 6)
    .. '\0\0\0\0\0\0\0'
    .. ARGV[6]
)
if attempt == 1 then
  return { next_fence, lost_at or 0 }
end
return { 'CLAIMED', next_fence, attempt, lease, lost_at or 0, info_before }

-- Classifies a key and, when it is free, takes it.
--
-- ARGV: 3 token, 4 fingerprint, 5 '1' when a lapse of this claim may be taken over, 6 tid and about,
--   7 lease in microseconds; with a quota also 8 records, 9 bytes, 10 in flight, 11 new keys, each '' when unlimited,
--   and 12 the microseconds in which those may come
-- Returns {'CLAIMED', fence, attempt, lease left} | {'REPLAYED', record, now, erasure or nothing}
--       | {'IN-FLIGHT', lease left} | {'MISMATCHED', first seen in ms} | {'UNKNOWN', reason} | {'CORRUPT'}
--       | {'OVER-QUOTA', limit, allowed, room in, window}; other times in microseconds

local name, token, fingerprint, takeover, tid_and_about, lease =
  ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1', ARGV[6], tonumber(ARGV[7])
local now = now_us()

-- What cannot be read stays where time does not end it: when its TTL was over it would be taken for absent.
local function corrupt()
  redis.call('PERSIST', KEYS[1])
  redis.call('ZADD', KEYS[3], decimal(math.floor(now / 1000)), name)
  return { 'CORRUPT' }
end

local function grant(last_fence, next_attempt, first_seen, counted, books)
  local floor = redis.call('HGET', KEYS[4], FENCE) or '0'
  -- What tonumber takes for a number may as well be nan, 0x1F or 1e300.
  if not string.find(floor, '^%d+$') then
    return { 'CORRUPT' }
  end
  -- From the clock and not from one: a Redis that forgot its floor must not hand out an old fence again.
  local next_fence = math.max(tonumber(floor) + 1, last_fence + 1, now)
  if next_fence > HIGHEST_FENCE then
    return { 'CORRUPT' }
  end
  local deadline = ms_after(now, lease)
  if counted then
    expect_sorted_set(KEYS[5])
  end
  -- First the write that fails on a full Redis or on a key of another type: then nothing is written at all.
  redis.call('ZADD', KEYS[2], decimal(deadline), name)
  if counted then
    redis.call('ZADD', KEYS[5], decimal(deadline), name)
  end
  if books then
    admit(books)
  end
  redis.call('HSET', KEYS[4], FENCE, decimal(next_fence))
  -- Without PX: a claim must not vanish by itself.
  redis.call(
    'SET',
    KEYS[1],
    first_byte(PROCESSING, takeover, false, counted)
      .. token
      .. digits(next_fence, 7)
      .. string.char(next_attempt)
      .. fingerprint
      .. digits(first_seen, 6)
      .. digits(deadline, 6)
      .. NO_RESULT
      .. tid_and_about
  )
  return { 'CLAIMED', next_fence, next_attempt, lease }
end

local function grant_new(last_fence)
  local first_seen = math.floor(now / 1000)
  if not ARGV[8] then
    return grant(last_fence, 1, first_seen, false)
  end
  local books = books_of({ ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12] }, now)
  if not books then
    return { 'CORRUPT' }
  end
  return refusal(books, now) or grant(last_fence, 1, first_seen, true, books)
end

local bytes = redis.pcall('GET', KEYS[1])
if not bytes then
  return grant_new(0)
end
-- A table is an error: the key is of another type.
local record = type(bytes) == 'string' and parsed(bytes)
if not record then
  return corrupt()
end
if expired(record, now) then
  return grant_new(fence(record))
end
if record.fingerprint ~= fingerprint then
  return { 'MISMATCHED', requested(record) }
end
if record.state == COMPLETED then
  return { 'REPLAYED', bytes, now, redis.call('HGET', KEYS[7], SHRED) }
end
if record.state == QUARANTINED then
  local size, at = length_at(bytes, record.head + 1)
  if not size or at + size - 1 > #bytes then
    return corrupt()
  end
  return { 'UNKNOWN', string.sub(bytes, at, at + size - 1) }
end
local left = record.deadline * 1000 - now
if record.token == token then
  return { 'CLAIMED', fence(record), attempt(record), math.max(left, 0) }
end
if left > 0 then
  return { 'IN-FLIGHT', left }
end
if record.takeover then
  return grant(fence(record), math.min(attempt(record) + 1, 255), requested(record), record.counted)
end
quarantine(record, name, now, '\13lease-expired')
return { 'UNKNOWN', 'lease-expired' }

-- Classifies a key and, when it is free, takes it.
--
-- ARGV: 3 token, 4 fingerprint, 5 '1' when a lapse of this claim may be taken over, 6 about, 7 lease in microseconds
-- Returns {'CLAIMED', fence, attempt, lease left} | {'REPLAYED', record, now} | {'IN-FLIGHT', lease left}
--       | {'MISMATCHED', first seen in ms} | {'UNKNOWN', reason} | {'CORRUPT'}; other times in microseconds

local name, token, fingerprint, takeover, about, lease =
  ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1', ARGV[6], tonumber(ARGV[7])
local now = now_us()

local function grant(last_fence, next_attempt, first_seen)
  local floor = redis.call('HGET', KEYS[4], 'fence') or '0'
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
  -- First the write that fails on a full Redis or on a key of another type: then nothing is written at all.
  redis.call('ZADD', KEYS[2], decimal(deadline), name)
  redis.call('HSET', KEYS[4], 'fence', decimal(next_fence))
  -- Without PX: a claim must not vanish by itself.
  redis.call(
    'SET',
    KEYS[1],
    first_byte(PROCESSING, takeover, false)
      .. token
      .. digits(next_fence, 7)
      .. string.char(next_attempt)
      .. fingerprint
      .. digits(first_seen, 6)
      .. digits(deadline, 6)
      .. NO_RESULT
      .. about
  )
  return { 'CLAIMED', next_fence, next_attempt, lease }
end

local bytes = redis.call('GET', KEYS[1])
if not bytes then
  return grant(0, 1, math.floor(now / 1000))
end
local record = parsed(bytes)
if not record then
  return { 'CORRUPT' }
end
if expired(record, now) then
  return grant(fence(record), 1, math.floor(now / 1000))
end
if record.fingerprint ~= fingerprint then
  return { 'MISMATCHED', requested(record) }
end
if record.state == COMPLETED then
  return { 'REPLAYED', bytes, now }
end
if record.state == QUARANTINED then
  return { 'UNKNOWN', string.sub(bytes, record.head + 1) }
end
local left = record.deadline * 1000 - now
if record.token == token then
  return { 'CLAIMED', fence(record), attempt(record), math.max(left, 0) }
end
if left > 0 then
  return { 'IN-FLIGHT', left }
end
if record.takeover then
  return grant(fence(record), math.min(attempt(record) + 1, 255), requested(record))
end
quarantine(record, name, now, 'lease-expired')
return { 'UNKNOWN', 'lease-expired' }

-- Classifies a key and, when it is free, takes it.
--
-- ARGV: 3 token, 4 fingerprint, 5 '1' when a lapse of this claim may be taken over, 6 about, 7 lease in microseconds
-- Returns {'CLAIMED', fence, attempt, lease left} | {'REPLAYED', record, now} | {'IN-FLIGHT', lease left}
--       | {'MISMATCHED', first seen in ms} | {'UNKNOWN', reason} | {'CORRUPT'}; other times in microseconds

local name, token, fingerprint, takeover, about = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local lease = tonumber(ARGV[7])
local now = now_us()

local function grant(previous)
  local floor = tonumber(redis.call('HGET', KEYS[4], 'fence') or 0)
  if not floor then
    return { 'CORRUPT' }
  end
  check_indexes()
  local record = {
    state = PROCESSING,
    takeover = takeover,
    success = 0,
    token = token,
    -- From the clock and not from one: a Redis that forgot its floor must not hand out an old fence again.
    fence = math.max(floor + 1, previous.fence + 1, now),
    attempt = math.min(previous.attempt + 1, 255),
    fingerprint = fingerprint,
    requested = previous.requested,
    deadline = ms_after(now, lease),
    duration = 0,
    status = 0,
    about = about,
    tail = '',
  }
  -- First the write that a full Redis refuses: then nothing is written at all. Without PX: a claim must not vanish.
  redis.call('SET', KEYS[1], written(record))
  redis.call('HSET', KEYS[4], 'fence', decimal(record.fence))
  redis.call('ZADD', KEYS[2], decimal(record.deadline), name)
  return { 'CLAIMED', record.fence, record.attempt, lease }
end

local bytes = redis.call('GET', KEYS[1])
local nobody = { fence = 0, attempt = 0, requested = math.floor(now / 1000) }
if not bytes then
  return grant(nobody)
end
local record = parsed(bytes)
if not record then
  return { 'CORRUPT' }
end
if expired(record, now) then
  nobody.fence = record.fence
  return grant(nobody)
end
if record.fingerprint ~= fingerprint then
  return { 'MISMATCHED', record.requested }
end
if record.state == COMPLETED then
  return { 'REPLAYED', bytes, now }
end
if record.state == QUARANTINED then
  return { 'UNKNOWN', record.tail }
end
local left = record.deadline * 1000 - now
if record.token == token then
  return { 'CLAIMED', record.fence, record.attempt, math.max(left, 0) }
end
if left > 0 then
  return { 'IN-FLIGHT', left }
end
if record.takeover == 1 then
  return grant(record)
end
check_indexes()
quarantine(record, name, now, 'lease-expired')
return { 'UNKNOWN', 'lease-expired' }

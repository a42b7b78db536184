-- Classifies a key and, when it is free, takes it.
--
-- This is the first half, for keys that are known. It goes on in grant.lua and ends in first_use.lua or, with a quota, in
-- counted_use.lua: making a function takes a while, and a replay should not wait for those that it does not need.
--
-- KEYS: 8 that the token was given up
-- ARGV: 3 token, 4 fingerprint, 5 one if a lapse of this claim may be taken over, and two more if others may wait for it,
--   6 tid and about, 7 lease in microseconds, 8 to 12 as in canary.lua; with a quota also 13 records, 14 bytes, 15 in flight,
--   16 new keys, each '' when unlimited, and 17 the microseconds in which those may come
-- Returns {'CLAIMED', fence, attempt, lease left, when memory was last lost in ms} | {'REPLAYED', record, now, erasure or nothing}
--       | {'IN-FLIGHT', lease left} | {'MISMATCHED', first seen in ms} | {'UNKNOWN', reason} | {'CORRUPT'} | {'GIVEN-UP'} | {'DOUBT'}
--       | {'OVER-QUOTA', limit, allowed, room in, window}; other times in microseconds

local name, token, fingerprint, takeover, tid_and_about, lease =
  ARGV[2], ARGV[3], ARGV[4], ARGV[5] % 2 == 1, ARGV[6], tonumber(ARGV[7])

local bytes = redis.pcall('GET', KEYS[1])
-- A table is an error: the key is of another type.
local record = type(bytes) == 'string' and parsed(bytes)
local live = record and not expired(record)
if live and record.fingerprint ~= fingerprint then
  return { 'MISMATCHED', requested(record) }
end
if live and record.state == COMPLETED then
  return { 'REPLAYED', bytes, now, redis.call('HGET', KEYS[7], SHRED) }
end

local function fence(record)
  return number(record.bytes, 18, 24)
end

local function attempt(record)
  return string.byte(record.bytes, 25)
end

if live and record.state == PROCESSING then
  local left = record.deadline * 1000 - now
  if record.token == token then
    local lost = tonumber(redis.call('HGET', KEYS[4], LOST) or '0')
    return { 'CLAIMED', fence(record), attempt(record), math.max(left, 0), lost }
  end
  if left > 0 then
    return { 'IN-FLIGHT', left }
  end
end


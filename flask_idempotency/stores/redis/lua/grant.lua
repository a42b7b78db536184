-- Goes on where claim.lua has found that the key is absent, lapsed, or nothing that could be read.

local function grant(last_fence, next_attempt, first_seen, counted, admit)
  if redis.call('EXISTS', KEYS[8]) == 1 then
    return { 'GIVEN-UP' }
  end
  local floor = memory[1] or '0'
  -- What tonumber takes for a number may as well be nan, 0x1F or 1e300.
  if not string.find(floor, '^%d+$') then
    return { 'CORRUPT' }
  end
  -- From the clock and not from one: a Redis that forgot its floor must not hand out an old fence again.
  local next_fence = math.max(tonumber(floor) + 1, last_fence + 1, now)
  if next_fence > HIGHEST_FENCE then
    return { 'CORRUPT' }
  end
  -- Up, so that nothing ends before its time.
  local deadline = math.ceil((now + lease) / 1000)
  if counted then
    redis.call('ZCARD', KEYS[5])
  end
  -- First the write that fails on a full Redis or on a key of another type: then nothing is written at all.
  redis.call('ZADD', KEYS[2], decimal(deadline), name)
  if counted then
    redis.call('ZADD', KEYS[5], decimal(deadline), name)
  end
  if admit then
    admit()
  end
  redis.call('HSET', KEYS[4], FENCE, decimal(next_fence))
  -- Without PX: a claim must not vanish by itself.
  redis.call(
    'SET',
    KEYS[1],
    first_byte(PROCESSING, takeover, ARGV[5] >= '2', counted)
      .. token
      .. digits(next_fence, 7)
      .. string.char(next_attempt)
      .. fingerprint
      .. digits(first_seen, 6)
      .. digits(deadline, 6)
      .. NO_RESULT
      .. tid_and_about
  )
  return { 'CLAIMED', next_fence, next_attempt, lease, since or 0 }
end

if live and record.state == QUARANTINED then
  local size, at = length_at(bytes, record.head + 1)
  if size and at + size - 1 <= #bytes then
    return { 'UNKNOWN', string.sub(bytes, at, at + size - 1) }
  end
end
-- What cannot be read stays where time does not end it: when its TTL was over it would be taken for absent.
if (bytes and not record) or (live and record.state == QUARANTINED) then
  redis.call('PERSIST', KEYS[1])
  redis.call('ZADD', KEYS[3], decimal(math.floor(now / 1000)), name)
  return { 'CORRUPT' }
end
-- An answer that has ended, and that Redis is to keep for longer than complete.lua has told it to, or for ever: a deadline
-- or a state with a flipped bit. It ends when Redis drops it. A clock of a test's own says nothing about that.
if record and not live and ARGV[1] == '' then
  local kept = redis.call('PTTL', KEYS[1])
  if kept == -1 or kept > AFTERLIFE + 5000 then
    return { 'CORRUPT' }
  end
end
if loss and loss ~= 'changed' and (not live or record.takeover) then
  return { 'FORGOTTEN', loss, noticed }
end
-- What was claimed before a loss may have been done, and its answer given, in what was forgotten.
if live and record.takeover and (after == 'run' or fence(record) > last_before) then
  return grant(fence(record), math.min(attempt(record) + 1, 255), requested(record), record.counted)
end
if live then
  quarantine(record, name, '\13lease-expired')
  return { 'UNKNOWN', 'lease-expired' }
end
if loss then
  return { 'FORGOTTEN', loss, noticed }
end
local last_fence, first_seen = record and fence(record) or 0, math.floor(now / 1000)


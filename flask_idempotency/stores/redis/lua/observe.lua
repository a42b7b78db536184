-- Note that a request in observe mode began, and return what it found. It classifies as claim does.
--
-- KEYS: 1 observation
-- ARGV: 1 now, 2 token, 3 fingerprint, 4 lease in microseconds, 5 for how many microseconds to remember the end,
--   6 '1' if an expired lease means that the outcome is unknown
-- Returns: {'new' | 'taken-over' | 'replay' | 'conflict' | 'mismatch' | 'unknown', microseconds since the first began} |
--   'CORRUPT'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/observation

local now, token, fingerprint = time_now(ARGV[1]), ARGV[2], ARGV[3]
local lease, keep, hold = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1'

local seen = parse_observation(redis.call('GET', KEYS[1]), now)
if seen == nil then
  return 'CORRUPT'
end
local ago = seen and math.max(now - seen.began, 0)
if seen and seen.fingerprint ~= fingerprint then
  return { 'mismatch', ago }
end
if seen and not is_watched(seen) then
  return { seen.state == REPLAY and 'replay' or 'unknown', ago }
end
if seen and seen.token == token then
  -- A repeated call finds what the first one found.
  return { seen.state == NEW and 'new' or 'taken-over', math.max(seen.watched - seen.began, 0) }
end
if seen and seen.lease_ends > now then
  return { 'conflict', ago }
end
if seen and hold then
  seen.state, seen.ends = UNKNOWN, now + keep
  write_observation(KEYS[1], seen, now)
  return { 'unknown', ago }
end
write_observation(KEYS[1], {
  state = seen and TAKEN_OVER or NEW,
  began = seen and seen.began or now,
  watched = now,
  lease_ends = now + lease,
  ends = now + lease + keep,
  token = token,
  fingerprint = fingerprint,
}, now)
return { seen and 'taken-over' or 'new', ago or 0 }

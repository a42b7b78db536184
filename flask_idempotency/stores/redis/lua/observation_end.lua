-- Note how a watched request ended, or forget it.
--
-- KEYS: 1 observation
-- ARGV: 1 now, 2 token, 3 'kept', 'released' or 'quarantined', 4 for how many microseconds to remember that
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/observation

local now, token, ending, keep = time_now(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])

local seen = parse_observation(redis.call('GET', KEYS[1]), now)
if seen and is_watched(seen) and seen.token == token then
  if ending == 'released' then
    redis.call('DEL', KEYS[1])
  else
    seen.state, seen.ends = ending == 'kept' and REPLAY or UNKNOWN, now + keep
    write_observation(KEYS[1], seen, now)
  end
end
return 'DONE'

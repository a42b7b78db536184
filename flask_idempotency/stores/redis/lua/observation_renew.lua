-- Extend the lease of a watched request to at least `lease` from now, and its life by the same time.
--
-- KEYS: 1 observation
-- ARGV: 1 now, 2 token, 3 lease in microseconds
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/observation

local now, token, lease = time_now(ARGV[1]), ARGV[2], tonumber(ARGV[3])

local seen = parse_observation(redis.call('GET', KEYS[1]), now)
local later = seen and now + lease - seen.lease_ends
if seen and is_watched(seen) and seen.token == token and later > 0 then
  seen.lease_ends, seen.ends = seen.lease_ends + later, seen.ends + later
  write_observation(KEYS[1], seen, now)
end
return 'DONE'

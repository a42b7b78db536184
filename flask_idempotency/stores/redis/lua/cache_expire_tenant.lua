-- Erase a tenant's cached responses: cache_get returns none that a worker read until now.
--
-- KEYS: 1 erasure of the tenant
-- ARGV: 1 now, 2 for how many ms to remember that
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/number

local now, ttl = time_now(ARGV[1]), ARGV[2]

-- Never earlier than an erasure before it, also if the clock was set back in between.
local before = tonumber(redis.call('GET', KEYS[1]) or '0') or 0
redis.call('SET', KEYS[1], decimal(math.max(before, now)), 'PX', ttl)
return 'DONE'

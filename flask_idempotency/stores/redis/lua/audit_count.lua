-- Count the latest changes of an actor. Read-only.
--
-- KEYS: 1 changes of the actor
-- ARGV: 1 now, 2 how many ms back
-- Returns: how many
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/number

local now_ms, span = math.floor(time_now(ARGV[1]) / 1000), tonumber(ARGV[2])

return redis.call('ZCOUNT', KEYS[1], '(' .. decimal(now_ms - span), '+inf')

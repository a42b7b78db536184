-- Read what a tenant has, and the limits that an operator set for it. Read-only.
--
-- KEYS: 1 tenant_unfinished, 2 tenant_quota
-- ARGV: 1 now
-- Returns: {now in microseconds, unfinished, in flight, {fields and values of tenant_quota}}
-- Durable: no
-- Transitions: none
-- @include lib/time

local now = time_now(ARGV[1])

return {
  now,
  redis.call('ZCARD', KEYS[1]),
  redis.call('ZCOUNT', KEYS[1], string.format('(%.3f', now / 1000), '+inf'),
  redis.call('HGETALL', KEYS[2]),
}

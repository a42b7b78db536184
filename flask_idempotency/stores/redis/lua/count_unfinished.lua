-- Count the records of a partition that are not completed. Read-only.
--
-- KEYS: 1 in_flight, 2 quarantine
-- ARGV: 1 now
-- Returns: {in flight, of these expired, microseconds since the first of these leases ended, quarantined}
-- Durable: no
-- Transitions: none
-- @include lib/time

local now = time_now(ARGV[1])

local expired, expired_for = redis.call('ZCOUNT', KEYS[1], '-inf', string.format('%.0f', math.floor(now / 1000))), 0
if expired > 0 then
  local first = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  expired_for = math.max(now - tonumber(first[2]) * 1000, 0)
end
return { redis.call('ZCARD', KEYS[1]), expired, expired_for, redis.call('ZCARD', KEYS[2]) }

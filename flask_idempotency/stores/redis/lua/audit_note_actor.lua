-- Note that an actor changed a record, once for each token.
--
-- KEYS: 1 changes of the actor
-- ARGV: 1 now, 2 token, 3 for how many ms to count it, 4 the most changes to count
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/number

local now_ms, token, kept, most = math.floor(time_now(ARGV[1]) / 1000), ARGV[2], tonumber(ARGV[3]), ARGV[4]

redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', decimal(now_ms - kept))
redis.call('ZADD', KEYS[1], 'NX', decimal(now_ms), token)
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, '-' .. decimal(most + 1))
redis.call('PEXPIRE', KEYS[1], decimal(kept))
return 'DONE'

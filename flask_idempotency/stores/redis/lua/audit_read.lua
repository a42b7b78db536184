-- Read the latest entries of the audit trail of a record. Read-only.
--
-- KEYS: 1 trail of the record
-- ARGV: 1 now, 2 how many
-- Returns: {now in microseconds, then the entries, the oldest first}
-- Durable: no
-- Transitions: none
-- @include lib/time

local now, limit = time_now(ARGV[1]), ARGV[2]

return { now, redis.call('LRANGE', KEYS[1], '-' .. limit, -1) }

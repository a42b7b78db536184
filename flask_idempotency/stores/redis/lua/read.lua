-- Read a record, the time, and when its tenant was erased, in one step. Read-only.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys
-- ARGV: 1 now
-- Returns: {now in microseconds, record or false, erasure or false}
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @layout ERASURE

return { time_now(ARGV[1]), redis.call('GET', KEYS[1]), redis.call('HGET', KEYS[7], ERASURE) }

-- The record as it stands, the time, and when its tenant was erased, in one look. Writes nothing.
--
-- Returns {now in microseconds, record or nothing, erasure or nothing}

return { now, redis.call('GET', KEYS[1]), redis.call('HGET', KEYS[7], SHRED) }

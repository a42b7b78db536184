-- The record as it stands, and the time, in one look. Writes nothing.
--
-- Returns {now in microseconds, record or nothing}

return { now_us(), redis.call('GET', KEYS[1]) }

-- What was last written down of each chore, and the time. Writes nothing.
--
-- KEYS: 1 the notes
-- ARGV: 1 now in microseconds, or '' for the server's own time
-- Returns {now, {chores and notes}}

return { now, redis.call('HGETALL', KEYS[1]) }

-- The time, in microseconds. Writes nothing.
--
-- KEYS: 1 the notes, for the server that keeps them
-- ARGV: 1 now in microseconds, or '' for the server's own time

return now

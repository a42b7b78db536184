-- Return the time in microseconds. Read-only.
--
-- KEYS: 1 task reports: of a Cluster, the node that holds them counts
-- ARGV: 1 now
-- Returns: now in microseconds
-- Durable: no
-- Transitions: none
-- @include lib/time

return time_now(ARGV[1])

-- Read the last report of each task, and the time. Read-only.
--
-- KEYS: 1 task reports
-- ARGV: 1 now
-- Returns: {now in microseconds, {tasks and reports}}
-- Durable: no
-- Transitions: none
-- @include lib/time

return { time_now(ARGV[1]), redis.call('HGETALL', KEYS[1]) }

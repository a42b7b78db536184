-- Store the report of a task that has just run.
--
-- KEYS: 1 task reports
-- ARGV: 1 now, 2 task, 3 report
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/number

local now, task, report = time_now(ARGV[1]), ARGV[2], ARGV[3]

redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
redis.call('HSET', KEYS[1], task, decimal(now) .. ' ' .. report)
return 'DONE'

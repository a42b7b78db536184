-- Writes down that a chore has run just now.
--
-- KEYS: 1 the notes
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 the chore, 3 its report
-- Returns 'DONE'

local chore, report = ARGV[2], ARGV[3]

redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
redis.call('HSET', KEYS[1], chore, decimal(now) .. ' ' .. report)
return 'DONE'

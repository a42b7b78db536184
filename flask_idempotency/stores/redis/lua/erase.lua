-- Of a tenant's cached answers none is good that was looked for until now.
--
-- KEYS: 1 when the tenant was erased
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 for how many milliseconds to remember that
-- Returns 'DONE'

local remembered = ARGV[2]

-- Later than a former one also where the clock was set back in between.
local before = tonumber(redis.call('GET', KEYS[1]) or '0') or 0
redis.call('SET', KEYS[1], decimal(math.max(before, now)), 'PX', remembered)
return 'DONE'

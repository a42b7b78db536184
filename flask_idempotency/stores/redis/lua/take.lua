-- Gives a chore to one for a while.
--
-- KEYS: 1 its lock
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 token, 3 lease in microseconds, 4 the longest that anybody
--   may have it, in microseconds
-- Returns 'TAKEN' | 'HELD'

local token, lease, longest = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local ends, holder = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (.*)$')
-- One that ends later still was taken before the clock was set back.
if ends and holder ~= token and tonumber(ends) > now and tonumber(ends) <= now + longest then
  return 'HELD'
end
redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
redis.call('SET', KEYS[1], decimal(now + lease) .. ' ' .. token, 'PX', decimal(math.ceil(lease / 1000)))
return 'TAKEN'

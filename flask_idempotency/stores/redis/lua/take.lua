-- Gives a chore to one for a while.
--
-- KEYS: 1 its lock
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 token, 3 lease in microseconds
-- Returns 'TAKEN' | 'HELD'

local token, lease = ARGV[2], tonumber(ARGV[3])

local ends, holder = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (.*)$')
if ends and tonumber(ends) > now and holder ~= token then
  return 'HELD'
end
redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
redis.call('SET', KEYS[1], decimal(now + lease) .. ' ' .. token, 'PX', decimal(math.ceil(lease / 1000)))
return 'TAKEN'

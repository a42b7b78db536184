-- Lets the next one have a chore.
--
-- KEYS: 1 its lock
-- ARGV: 1 not looked at; 2 token
-- Returns 'DONE'

local token = ARGV[2]

if string.match(redis.call('GET', KEYS[1]) or '', '^%d+ (.*)$') == token then
  redis.call('DEL', KEYS[1])
end
return 'DONE'

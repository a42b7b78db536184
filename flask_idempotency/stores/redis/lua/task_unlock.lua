-- Unlock a task, if this janitor holds its lock.
--
-- KEYS: 1 lock of the task
-- ARGV: 1 not used, 2 token
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none

local token = ARGV[2]

if string.match(redis.call('GET', KEYS[1]) or '', '^%d+ (.*)$') == token then
  redis.call('DEL', KEYS[1])
end
return 'DONE'

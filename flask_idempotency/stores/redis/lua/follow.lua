-- Writes, whatever ran before it: replicas that have this have that too.
--
-- KEYS: 1 what is written to, 2 partition memory: see layout.py
-- ARGV: 1 now in microseconds or ''; it does not matter here
-- Returns 'DONE'

redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
redis.call('SET', KEYS[1], '', 'PX', 60000)
return 'DONE'

-- A tenant's data keys, and the id of the store that they are in, which is made when there is none.
--
-- KEYS: 1 partition memory, 2 data keys
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 random bytes, for an id
-- Returns {now, id, {fields and values of the data keys}}

local fields = redis.call('HGETALL', KEYS[2])
local id = redis.call('HGET', KEYS[1], STORE)
if not id then
  id = ARGV[2]
  redis.call('HSET', KEYS[1], STORE, id)
end
return { now, id, fields }

-- Read a tenant's data keys, and the id of the store that holds them. Make the id if the partition has none.
--
-- KEYS: 1 partition, 2 tenant_keys
-- ARGV: 1 now, 2 random bytes for an id
-- Returns: {now in microseconds, id, {fields and values of tenant_keys}}
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @layout DATA_KEYS_ID

local fields = redis.call('HGETALL', KEYS[2])
local id = redis.call('HGET', KEYS[1], DATA_KEYS_ID)
if not id then
  id = ARGV[2]
  redis.call('HSET', KEYS[1], DATA_KEYS_ID, id)
end
return { time_now(ARGV[1]), id, fields }

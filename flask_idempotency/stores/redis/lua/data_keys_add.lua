-- Add a data key of a tenant, if the tenant has no newer one than its maker saw, and if this is the store that it is for.
--
-- KEYS: 1 partition, 2 tenant_keys
-- ARGV: 1 not used, 2 id of the store, 3 number of the key, 4 the key as layout.py says, 5 the last number that was seen
-- Returns: 'DONE' | 'OTHER' | 'CORRUPT'
-- Durable: no
-- Transitions: none
-- @layout DATA_KEYS_ID LAST_KEY

local id, key_number, key, seen = ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local last = redis.call('HGET', KEYS[2], LAST_KEY) or '0'
if not string.find(last, '^%d+$') then
  return 'CORRUPT'
end
local is_next = tonumber(last) == tonumber(seen) and tonumber(key_number) > tonumber(last)
if redis.call('HGET', KEYS[1], DATA_KEYS_ID) ~= id or not is_next then
  return 'OTHER'
end
redis.call('HSET', KEYS[2], key_number, key, LAST_KEY, key_number)
return 'DONE'

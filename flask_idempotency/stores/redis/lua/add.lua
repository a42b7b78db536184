-- Keeps one more data key of a tenant, if its number is above the last, whoever brings it has seen that one, and the store
-- still is the one that it was made for.
--
-- KEYS: 1 partition memory, 2 data keys
-- ARGV: 1 not looked at; 2 the store's id, 3 the key's number, 4 the key, as layout.py says, 5 the last number as it was seen
-- Returns 'DONE' | 'OTHER' | 'CORRUPT'

local id, key_number, key, after = ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local last = redis.call('HGET', KEYS[2], LAST) or '0'
if not string.find(last, '^%d+$') then
  return 'CORRUPT'
end
local rises = tonumber(last) == tonumber(after) and tonumber(key_number) > tonumber(last)
if redis.call('HGET', KEYS[1], STORE) ~= id or not rises then
  return 'OTHER'
end
redis.call('HSET', KEYS[2], key_number, key, LAST, key_number)
return 'DONE'

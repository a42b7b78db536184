-- Keeps one more data key of a tenant, if its number is the next and the store still is the one that it was made for.
--
-- KEYS: 1 partition memory, 2 data keys
-- ARGV: 1 not looked at; 2 the store's id, 3 the key's number, 4 the key, as layout.py says
-- Returns 'DONE' | 'OTHER' | 'CORRUPT'

local id, key_number, key = ARGV[2], ARGV[3], ARGV[4]

local last = redis.call('HGET', KEYS[2], LAST) or '0'
if not string.find(last, '^%d+$') then
  return 'CORRUPT'
end
local is_next = tonumber(last) == 0 or decimal(tonumber(last) + 1) == key_number
if redis.call('HGET', KEYS[1], STORE) ~= id or not is_next or tonumber(key_number) < 1 then
  return 'OTHER'
end
redis.call('HSET', KEYS[2], key_number, key, LAST, key_number)
return 'DONE'

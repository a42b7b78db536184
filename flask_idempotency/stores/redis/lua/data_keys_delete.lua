-- Delete a data key that is disabled.
--
-- KEYS: 1 tenant_keys
-- ARGV: 1 not used, 2 number of the key
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none
-- @layout DISABLED

local key_number = ARGV[2]

if redis.call('HEXISTS', KEYS[1], DISABLED .. key_number) == 1 then
  redis.call('HDEL', KEYS[1], key_number, DISABLED .. key_number)
end
return 'DONE'

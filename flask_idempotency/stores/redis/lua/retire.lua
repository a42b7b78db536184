-- Forgets a data key that is closed.
--
-- KEYS: 1 data keys
-- ARGV: 1 not looked at; 2 the key's number
-- Returns 'DONE'

local key_number = ARGV[2]

if redis.call('HEXISTS', KEYS[1], CLOSED .. key_number) == 1 then
  redis.call('HDEL', KEYS[1], key_number, CLOSED .. key_number)
end
return 'DONE'

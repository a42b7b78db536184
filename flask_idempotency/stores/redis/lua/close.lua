-- From now on no answer is stored that this data key has sealed. It stays closed since when it was first.
--
-- KEYS: 1 data keys
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 the key's number
-- Returns 'DONE'

local key_number = ARGV[2]

if redis.call('HEXISTS', KEYS[1], key_number) == 1 then
  redis.call('HSETNX', KEYS[1], CLOSED .. key_number, decimal(now))
end
return 'DONE'

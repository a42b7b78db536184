-- Disable a data key: no response that it seals is stored from now on. A second call keeps the time of the first.
--
-- KEYS: 1 tenant_keys
-- ARGV: 1 now, 2 number of the key
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/number
-- @layout DISABLED

local key_number = ARGV[2]

if redis.call('HEXISTS', KEYS[1], key_number) == 1 then
  redis.call('HSETNX', KEYS[1], DISABLED .. key_number, decimal(time_now(ARGV[1])))
end
return 'DONE'

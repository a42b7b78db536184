-- Erase a tenant: delete its data keys, and remember when that was and the last key's number.
--
-- KEYS: 1 tenant_keys
-- ARGV: 1 now
-- Returns: how many keys were deleted
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/number
-- @layout LAST_KEY ERASURE

local last = redis.call('HGET', KEYS[1], LAST_KEY) or '0'
local deleted = 0
-- First, because it needs no memory: a full Redis erases, too.
redis.call('PERSIST', KEYS[1])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if field ~= LAST_KEY and field ~= ERASURE then
    redis.call('HDEL', KEYS[1], field)
    deleted = deleted + (string.find(field, '^%d+$') and 1 or 0)
  end
end
redis.call('HSET', KEYS[1], ERASURE, last .. ' ' .. decimal(time_now(ARGV[1])))
return deleted

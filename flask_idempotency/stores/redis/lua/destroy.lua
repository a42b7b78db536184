-- Erases a tenant: its data keys are gone, and from when on and up to which number is remembered.
--
-- KEYS: 1 data keys
-- ARGV: 1 now in microseconds, or '' for the server's own time
-- Returns how many keys there were

local last = redis.call('HGET', KEYS[1], LAST) or '0'
local gone = 0
-- First, because it needs no memory: a full Redis erases too.
redis.call('PERSIST', KEYS[1])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if field ~= LAST and field ~= SHRED then
    redis.call('HDEL', KEYS[1], field)
    gone = gone + (string.find(field, '^%d+$') and 1 or 0)
  end
end
redis.call('HSET', KEYS[1], SHRED, last .. ' ' .. decimal(now))
return gone

-- Delete a cache entry, but not one that cache_invalidate has put there: that one keeps out responses that still travel.
-- Delete the erasure of its tenant, too, if its value has another type.
--
-- KEYS: 1 cache entry, 2 erasure of its tenant
-- ARGV: 1 not used, 2 how long an entry of cache_invalidate is, in bytes
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none

local invalidated = tonumber(ARGV[2])

-- STRLEN of another type is an error, and so not a number.
if redis.pcall('STRLEN', KEYS[1]) ~= invalidated then
  redis.call('DEL', KEYS[1])
end
if type(redis.pcall('STRLEN', KEYS[2])) ~= 'number' then
  redis.call('DEL', KEYS[2])
end
return 'DONE'

-- Delete a cache entry, but not one that cache_invalidate has put there: that one keeps out responses that still travel.
-- Delete the erasure of its tenant, too, if its value has another type.
--
-- KEYS: 1 cache entry, 2 erasure of its tenant
-- ARGV: 1 not used, 2 how long an entry of cache_invalidate is, in bytes, 3 such an entry up to its fence, to leave it in
--   the place of a response that is not damaged; '' to leave none
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none

local invalidated, beginning = tonumber(ARGV[2]), ARGV[3]

-- STRLEN of another type is an error, and so not a number.
local size = redis.pcall('STRLEN', KEYS[1])
local ttl = redis.call('PTTL', KEYS[1])
local erasure = redis.pcall('STRLEN', KEYS[2])
if beginning ~= '' and type(size) == 'number' and size > invalidated and ttl > 0 then
  -- Leave the fence: the response of an earlier claim may still travel, and would otherwise be replayed from here.
  local fence = string.sub(redis.call('GET', KEYS[1]), #beginning + 1, invalidated)
  redis.call('SET', KEYS[1], beginning .. fence, 'PX', ttl)
elseif size ~= invalidated then
  redis.call('DEL', KEYS[1])
end
if type(erasure) ~= 'number' then
  redis.call('DEL', KEYS[2])
end
return 'DONE'

-- Correct the bytes of a tenant's journals by a recount.
--
-- KEYS: 1 tenant_quota
-- ARGV: 1 not used, 2 the count before the recount, '' for none, 3 the bytes as counted
-- Returns: {bytes too many, 1 if the count changed during the recount, else 0}
-- Durable: no
-- Transitions: none
-- @include lib/number
-- @layout JOURNALS

local before, counted = ARGV[2], tonumber(ARGV[3])

local count = redis.call('HGET', KEYS[1], JOURNALS) or ''
if count ~= before then
  return { 0, 1 }
end
if counted > 0 then
  redis.call('HSET', KEYS[1], JOURNALS, decimal(counted))
else
  redis.call('HDEL', KEYS[1], JOURNALS)
end
return { (tonumber(string.match(count, '^%d+$')) or 0) - counted, 0 }

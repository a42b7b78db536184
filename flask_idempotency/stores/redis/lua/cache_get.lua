-- Read a cached response, if it has not expired and its tenant was not erased since. Read-only.
--
-- KEYS: 1 cache entry, 2 erasure of its tenant
-- ARGV: 1 now
-- Returns: {now} | {now, life left, sealed record}; times in microseconds
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/record

local now = time_now(ARGV[1])

local entry = redis.call('GET', KEYS[1])
local left = entry and read_number(entry, 1, 7) - now
if not left or left <= 0 then
  return { now }
end
local erased_at = redis.call('GET', KEYS[2])
local is_newer = erased_at and read_number(entry, 8, 14) > (tonumber(erased_at) or now)
if erased_at and not is_newer then
  return { now }
end
return { now, left, string.sub(entry, 15) }

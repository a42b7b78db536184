-- Looks for a cached answer whose life has not ended and that was not erased, and tells the time. Writes nothing.
--
-- KEYS: 1 entry, 2 when its tenant was erased
-- ARGV: 1 now in microseconds, or '' for the server's own time
-- Returns {now} | {now, life left, sealed record}; times in microseconds

local entry = redis.call('GET', KEYS[1])
local left = entry and number(entry, 1, 7) - now
if not left or left <= 0 then
  return { now }
end
local erased_at = redis.call('GET', KEYS[2])
if erased_at and not (number(entry, 8, 14) > (tonumber(erased_at) or now)) then
  return { now }
end
return { now, left, string.sub(entry, 15) }

-- Looks for a cached answer whose life has not ended, and tells the time. Writes nothing.
--
-- KEYS: 1 entry
-- ARGV: 1 now in microseconds, or '' for the server's own time
-- Returns {now} | {now, life left, sealed record}; times in microseconds

local now = now_us()

local entry = redis.call('GET', KEYS[1])
local left = entry and number(entry, 1, 7) - now
if not left or left <= 0 then
  return { now }
end
return { now, left, string.sub(entry, 8) }

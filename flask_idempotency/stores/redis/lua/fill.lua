-- Caches an answer, unless its life has ended or that of a later claim is there.
--
-- KEYS: 1 entry: its deadline in 7 bytes, and the sealed record
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 what peek told as now, before the system of record
--       was asked; 3 life left when it answered, in microseconds; 4 sealed record
-- Returns 'FILLED' | 'ENDED' | 'OLDER'

local missed_at, left, sealed = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local now = now_us()

-- From before the question and not from now: this script may have been on its way for hours, in the buffers of a server
-- that was frozen. From now only where the clock was set back in between.
local deadline = math.min(missed_at, now) + left
if deadline <= now then
  return 'ENDED'
end
local entry = redis.call('GET', KEYS[1])
if entry and number(entry, 1, 7) > now and number(entry, 25, 31) > number(sealed, 18, 24) then
  return 'OLDER'
end
redis.call('SET', KEYS[1], digits(deadline, 7) .. sealed, 'PX', decimal(math.ceil((deadline - now) / 1000)))
return 'FILLED'

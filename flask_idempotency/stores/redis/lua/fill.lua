-- Caches an answer, unless its life has ended, that of a later claim is there, or its tenant was erased meanwhile.
--
-- KEYS: 1 entry: its deadline and when it was looked for, in 7 bytes each, and the sealed record;
--   2 when its tenant was erased
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 what peek told as now, before the system of record
--       was asked; 3 life left when it answered, in microseconds; 4 sealed record
-- Returns 'FILLED' | 'ENDED' | 'OLDER' | 'ERASED'

local missed_at, left, sealed = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]

-- From before the question and not from now: this script may have been on its way for hours, in the buffers of a server
-- that was frozen. From now only where the clock was set back in between.
local looked_at = math.min(missed_at, now)
local deadline = looked_at + left
if deadline <= now then
  return 'ENDED'
end
local erased_at = redis.call('GET', KEYS[2])
erased_at = erased_at and (tonumber(erased_at) or now)
if erased_at and not (looked_at > erased_at) then
  return 'ERASED'
end
local entry = redis.call('GET', KEYS[1])
local good = entry and not (erased_at and number(entry, 8, 14) <= erased_at)
if good and number(entry, 1, 7) > now and number(entry, 32, 38) > number(sealed, 18, 24) then
  return 'OLDER'
end
local text = digits(deadline, 7) .. digits(looked_at, 7) .. sealed
redis.call('SET', KEYS[1], text, 'PX', decimal(math.ceil((deadline - now) / 1000)))
return 'FILLED'

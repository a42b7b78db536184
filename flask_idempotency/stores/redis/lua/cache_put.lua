-- Cache a response, unless it has expired, a later claim's response is there, or its tenant was erased since it was read.
--
-- The entry is the deadline and the time of the miss, 7 bytes each, and then the sealed record.
--
-- KEYS: 1 cache entry, 2 erasure of its tenant
-- ARGV: 1 now, 2 the time that cache_get returned before the worker read the system of record,
--   3 life left when that answered, in microseconds, 4 sealed record
-- Returns: 'FILLED' | 'ENDED' | 'OLDER' | 'ERASED'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/number
-- @include lib/record

local now, missed_at, left, sealed = time_now(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]

-- Count the life from before the read, and not from now: a frozen server may run this script hours later. Count it from now
-- only if the clock was set back in between.
local looked_at = math.min(missed_at, now)
local deadline = looked_at + left
if deadline <= now then
  return 'ENDED'
end
local erased_at = redis.call('GET', KEYS[2])
erased_at = erased_at and (tonumber(erased_at) or now)
local is_newer = erased_at and looked_at > erased_at
if erased_at and not is_newer then
  return 'ERASED'
end
local entry = redis.call('GET', KEYS[1])
local good = entry and not (erased_at and read_number(entry, 8, 14) <= erased_at)
if good and read_number(entry, 1, 7) > now and read_number(entry, 32, 38) > read_number(sealed, 18, 24) then
  return 'OLDER'
end
local text = big_endian(deadline, 7) .. big_endian(looked_at, 7) .. sealed
redis.call('SET', KEYS[1], text, 'PX', decimal(math.ceil((deadline - now) / 1000)))
return 'FILLED'

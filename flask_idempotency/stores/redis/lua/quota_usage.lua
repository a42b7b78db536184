-- Read what a tenant uses of its quota, as a claim counts it. Read-only.
--
-- KEYS: 1 tenant_unfinished, 2 tenant_quota
-- ARGV: 1 now
-- Returns: {records, bytes, in flight, new keys in the fullest window that is open} | 'CORRUPT'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/quota

local now = time_now(ARGV[1])
local found = redis.call('HMGET', KEYS[2], TOTALS, JOURNALS)
local totals, journals = parse_totals(found[1]), string.match(found[2] or '0', '^%d+$')
if not totals or not journals then
  return 'CORRUPT'
end

local new_keys, fields = 0, redis.call('HGETALL', KEYS[2])
for i = 1, #fields, 2 do
  local length = string.match(fields[i], '^' .. WINDOW .. '(%d+)$')
  local bucket_end = bucket_end_of(fields[i])
  local is_read = length or (bucket_end and bucket_end * 1000 <= now)
  if is_read and not string.match(fields[i + 1], '^%d+ %d+$') then
    return 'CORRUPT'
  end
  if length and tonumber(length) > 0 then
    new_keys = math.max(new_keys, read_window(KEYS[2], tonumber(length), now).count)
  end
end
local left = sweep(KEYS[2], totals, true, now)
local records, bytes = redis.call('ZCARD', KEYS[1]) + left.records, left.bytes + tonumber(journals)
-- Redis replies with whole numbers of 63 bits, and Lua counts exactly up to this one.
-- Hence `not`: hundreds of digits are infinity, and the difference of two such counts compares with no number.
if not (records <= 2 ^ 53 and bytes <= 2 ^ 53 and new_keys <= 2 ^ 53) then
  return 'CORRUPT'
end

return { records, bytes, redis.call('ZCOUNT', KEYS[1], string.format('(%.3f', now / 1000), '+inf'), new_keys }

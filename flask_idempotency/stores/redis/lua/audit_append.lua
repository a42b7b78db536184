-- Add an entry to the audit trail of a record, once for each token.
--
-- An entry is its time in microseconds, a blank, its token of 16 bytes, and its text.
--
-- KEYS: 1 trail of the record, 2 names of the tenant's records that have a trail
-- ARGV: 1 now, 2 name of the record, 3 token, 4 text, 5 for how many ms to keep it
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/number

local now, name, token, text, kept = time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])

redis.call('ZCARD', KEYS[2]) -- A wrong type must fail before the first write.
for _, entry in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  local before = string.match(entry, '^%d+ (.*)$') or ''
  if string.sub(before, 1, #token) == token then
    return 'DONE'
  end
end
redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
redis.call('RPUSH', KEYS[1], decimal(now) .. ' ' .. token .. text)
redis.call('PEXPIRE', KEYS[1], decimal(kept))
local now_ms = math.floor(now / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', decimal(now_ms - kept))
redis.call('ZADD', KEYS[2], decimal(now_ms), name)
redis.call('PEXPIRE', KEYS[2], decimal(kept))
return 'DONE'

-- Replace a cached response by an entry that replays no response, and keeps out responses up to its fence.
--
-- KEYS: 1 cache entry
-- ARGV: 1 not used, 2 the entry, 3 for how many ms
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none
-- @include lib/record

local entry, ttl = ARGV[2], ARGV[3]

-- This call may arrive late. Keep an entry with a higher fence: it keeps out more.
if redis.pcall('STRLEN', KEYS[1]) == #entry then
  if read_number(redis.call('GET', KEYS[1]), 32, 38) > read_number(entry, 32, 38) then
    return 'DONE'
  end
end
redis.call('SET', KEYS[1], entry, 'PX', ttl)
return 'DONE'

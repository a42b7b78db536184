-- Lets the key run again, whatever state its record is in, and notes for a while that it was this call that did so.
--
-- KEYS: 8 that note
-- ARGV: 3 state, 4 token and 5 deadline in ms, as they were seen; 6 a fresh token, the same whenever this call is repeated;
--   7 for how many milliseconds to remember it
-- Returns 'DONE' | 'OTHER'

local name, state, token, deadline, fresh, remembered = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local record = as_seen(redis.call('GET', KEYS[1]), state, token, deadline)
if not record then
  -- Freed by this very call, perhaps, whose reply was lost.
  return redis.pcall('GET', KEYS[8]) == fresh and 'DONE' or 'OTHER'
end
local books = record.state == COMPLETED and record.counted and looked_up(record.deadline)
if record.state ~= COMPLETED then
  leave_indexes(record, name)
end
redis.call('DEL', KEYS[1])
-- After a write that needs no memory: see owner.lua.
redis.call('SET', KEYS[8], fresh, 'PX', remembered)
if books then
  leave(books, byte_size(record.bytes, record.head + 1))
end
ring(record, name)
return 'DONE'

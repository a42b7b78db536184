-- Lets the key run again, whatever state its record is in.
--
-- ARGV: 3 state, 4 token and 5 deadline in ms, as they were seen
-- Returns 'DONE' | 'OTHER'

local name, state, token, deadline = ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local record = as_seen(redis.call('GET', KEYS[1]), state, token, deadline)
if not record then
  return 'OTHER'
end
if record.state ~= COMPLETED then
  leave_indexes(record, name)
  redis.call('DEL', KEYS[1])
  return 'DONE'
end
local books = record.counted and looked_up(record.deadline)
redis.call('DEL', KEYS[1])
if books then
  leave(books, byte_size(record.bytes, record.head + 1))
end
return 'DONE'

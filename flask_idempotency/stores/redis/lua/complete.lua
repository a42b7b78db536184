-- Stores what came of the work, once.
--
-- ARGV: 3 token, 4 keep in microseconds, 5 '1' for success, 6 status, 7 byte size, seal and payload, 8 number of the data
--   key that it is sealed with, '0' for none, 9 width of a bucket in ms
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'CORRUPT' | 'ERASED' | 'KEYLESS'

local name, token, keep, succeeded, status, payload, key_number, width =
  ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1', tonumber(ARGV[6]), ARGV[7], ARGV[8], tonumber(ARGV[9])
local now = now_us()

local record, refused = owned(token, now)
if not record then
  return refused
end
if record.state == COMPLETED then
  return 'DONE'
end
local no_key = key_refused(record, key_number)
if no_key then
  return no_key
end
local deadline, books, size = ms_after(now, keep), nil, 0
if record.counted then
  -- What ends in one bucket ends with it, and is not counted down one by one.
  deadline = math.ceil((now + keep) / (width * 1000)) * width
  books, size = looked_up(deadline), math.min(length_at(payload, 1) or 0, LARGEST_COUNTED)
end
-- A clock that was set back would make it negative.
local duration = math.min(math.max(math.floor(now / 1000) - requested(record), 0), LONGEST_DURATION)
local first = first_byte(COMPLETED, record.takeover, succeeded, record.counted)
local result = digits(duration, 5) .. digits(status, 2)
local bytes = rewritten(record, first, deadline, result, payload)
leave_indexes(record, name)
if books then
  enter(books, size)
end
-- Redis drops the record a minute after its own deadline: what counts is the deadline, and scripts see both clocks.
redis.call('SET', KEYS[1], bytes, 'PX', decimal(math.ceil(deadline - now / 1000) + 60000))
return 'DONE'

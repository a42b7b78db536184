-- Stores what came of the work, once.
--
-- ARGV: 3 token, 4 keep in microseconds, 5 '1' for success, 6 status, 7 byte size and payload
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'CORRUPT'

local name, token, keep, success, status, payload =
  ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1', tonumber(ARGV[6]), ARGV[7]
local now = now_us()

local record, refusal = owned(token, now)
if not record then
  return refusal
end
if record.state == COMPLETED then
  return 'DONE'
end
-- A clock that was set back would make it negative.
local duration = math.min(math.max(math.floor(now / 1000) - requested(record), 0), LONGEST_DURATION)
local first = first_byte(COMPLETED, record.takeover, success)
local result = digits(duration, 5) .. digits(status, 2)
local bytes = rewritten(record, first, ms_after(now, keep), result, payload)
leave_index(record, name)
-- Redis drops the record a minute after its own deadline: what counts is the deadline, and scripts see both clocks.
redis.call('SET', KEYS[1], bytes, 'PX', decimal(math.ceil(keep / 1000) + 60000))
return 'DONE'

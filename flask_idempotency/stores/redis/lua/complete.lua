-- Stores what came of the work, once.
--
-- ARGV: 3 token, 4 keep in microseconds, 5 '1' for success, 6 status, 7 byte size and payload
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'CORRUPT'

local name, token, keep, success, status, payload =
  ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local now = now_us()

local record, refusal = owned(token, now)
if not record then
  return refusal
end
if record.state == COMPLETED then
  return 'DONE'
end
record.state = COMPLETED
record.success = success
record.status = status
-- A clock that was set back would make it negative.
record.duration = math.min(math.max(math.floor(now / 1000) - record.requested, 0), LONGEST_DURATION)
record.deadline = ms_after(now, keep)
record.tail = payload
write_even_when_full()
-- Redis drops the record a minute after its own deadline: what counts is the deadline, and scripts see both clocks.
redis.call('SET', KEYS[1], written(record), 'PX', decimal(math.ceil(keep / 1000) + 60000))
redis.call('ZREM', KEYS[2], name)
redis.call('ZREM', KEYS[3], name)
return 'DONE'

-- Lets a lease end later, never sooner.
--
-- ARGV: 3 token, 4 lease in microseconds
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'CORRUPT'

local name, token, lease = ARGV[2], ARGV[3], tonumber(ARGV[4])
local now = now_us()

local record, refusal = owned(token, now)
if not record then
  return refusal
end
local deadline = ms_after(now, lease)
if record.state == PROCESSING and deadline > record.deadline then
  if record.counted then
    expect_sorted_set(KEYS[5])
  end
  write_even_when_full()
  redis.call('ZADD', KEYS[2], decimal(deadline), name)
  if record.counted then
    redis.call('ZADD', KEYS[5], decimal(deadline), name)
  end
  local first = first_byte(PROCESSING, record.takeover, false, record.counted)
  redis.call('SET', KEYS[1], rewritten(record, first, deadline, NO_RESULT, ''))
end
return 'DONE'

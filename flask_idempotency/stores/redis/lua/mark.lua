-- From now on a lapse quarantines this record.
--
-- ARGV: 3 token
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'CORRUPT'

local token = ARGV[3]

local record, refusal = owned(token, now_us())
if not record then
  return refusal
end
if record.state == COMPLETED then
  return 'LOST'
end
if record.state == PROCESSING and record.takeover == 1 then
  record.takeover = 0
  write_even_when_full()
  redis.call('SET', KEYS[1], written(record))
end
return 'DONE'

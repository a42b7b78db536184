-- Quarantines a record whose owner has fallen silent.
--
-- ARGV: 3 token and 4 deadline in ms, as they were seen; 5 by when the lease must have been over, in microseconds
-- Returns 'DONE' | 'OTHER'

local name, token, deadline, horizon = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])

local record = as_seen(redis.call('GET', KEYS[1]), '1', token, deadline)
if not record or record.takeover or record.deadline * 1000 > math.min(horizon, now) then
  return 'OTHER'
end
quarantine(record, name, LAPSED)
return 'DONE'

-- Quarantine a record whose lease expired without a word from its worker.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys
-- ARGV: 1 now, 2 name, 3 token and 4 deadline in ms as they were seen, 5 when the lease must have ended, in microseconds
-- Returns: 'DONE' | 'OTHER'
-- Durable: no
-- Transitions: processing -> quarantined
-- @include lib/time
-- @include lib/snapshot
-- @include lib/quarantine

local now, name, token, deadline, horizon = time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])

local record = as_seen(redis.call('GET', KEYS[1]), '1', token, deadline, now)
if not record or record.takeover or record.deadline * 1000 > math.min(horizon, now) then
  return 'OTHER'
end
quarantine(KEYS, record, name, LEASE_EXPIRED, now)
return 'DONE'

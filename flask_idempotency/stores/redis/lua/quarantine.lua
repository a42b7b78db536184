-- Quarantine a record because its worker does not know the outcome.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys
-- ARGV: 1 now, 2 name, 3 token, 4 reason with its length before it
-- Returns: 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT'
-- Durable: yes
-- Transitions: processing -> quarantined
-- @include lib/time
-- @include lib/owner
-- @include lib/finished
-- @include lib/quarantine

local now, name, token, reason = time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]

local record, refused = owned_record(KEYS, redis.call('GET', KEYS[1]), token, now)
if not record then
  return refused
end
local finished = finished_word(record)
if finished then
  return finished
end
if record.state == PROCESSING then
  quarantine(KEYS, record, name, reason, now)
end
return 'DONE'

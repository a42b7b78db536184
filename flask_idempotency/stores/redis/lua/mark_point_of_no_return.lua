-- Mark the record: if its lease expires from now on, quarantine it, and let no worker take it over.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys
-- ARGV: 1 now, 2 name, 3 token
-- Returns: 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT'
-- Durable: yes
-- Transitions: processing -> processing
-- @include lib/time
-- @include lib/owner
-- @include lib/finished
-- @include lib/notify

local now, token = time_now(ARGV[1]), ARGV[3]

local record, refused = owned_record(KEYS, redis.call('GET', KEYS[1]), token, now)
if not record then
  return refused
end
local finished = finished_word(record)
if finished then
  return finished
end
if record.state == PROCESSING and record.takeover then
  redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
  local first = first_byte(PROCESSING, false, has_waiters(record), record.counted)
  redis.call('SET', KEYS[1], rewritten(record, first, record.deadline, NO_RESULT, ''))
end
return 'DONE'

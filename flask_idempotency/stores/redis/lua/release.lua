-- Let the key run again. Redis grants this token no claim from now on: a claim that still travels has no worker any more,
-- and would hold the key until its lease expires.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, 8 cancelled
-- ARGV: 1 now, 2 name, 3 token, 4 for how many ms to remember that
-- Returns: 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT'
-- Durable: yes
-- Transitions: processing -> absent, quarantined -> absent
-- @include lib/time
-- @include lib/owner
-- @include lib/finished
-- @include lib/notify

local now, name, token, ttl = time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]

local record, refused = owned_record(KEYS, redis.call('GET', KEYS[1]), token, now)
if not record and refused == 'CORRUPT' then
  return refused
end
local finished = record and finished_word(record)
if finished then
  return finished
end
if record then
  leave_indexes(KEYS, record, name)
  redis.call('DEL', KEYS[1])
end
redis.call('PERSIST', KEYS[8]) -- Needs no memory: see leave_indexes in lib/write.
redis.call('SET', KEYS[8], '', 'PX', ttl)
if record then
  notify(record, name)
end
return record and 'DONE' or refused

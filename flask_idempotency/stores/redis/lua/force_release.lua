-- Let the key run again from the beginning, whatever state its record is in, and remove its journal. Remember for a while
-- that this call did it, so that a repeated call succeeds too.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, 8 freed,
--   9 journal
-- ARGV: 1 now, 2 name, as they were seen: 3 state, 4 token, 5 deadline in ms; 6 id of this call, 7 for how many ms to
--   remember it, 8 as it was seen: '1' if an expired lease may be taken over, else '0'
-- Returns: 'DONE' | 'OTHER'
-- Durable: yes
-- Transitions: processing -> absent, quarantined -> absent, completed -> absent
-- @include lib/time
-- @include lib/snapshot
-- @include lib/response
-- @include lib/write
-- @include lib/notify
-- @include lib/quota_totals
-- @include lib/journal

local now, name, state, token, deadline, call_id, ttl =
  time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local record = as_seen(redis.call('GET', KEYS[1]), state, token, deadline, now)
if not record or record.takeover ~= (ARGV[8] == '1') then
  -- This very call may have released it before, and its reply was lost.
  return redis.pcall('GET', KEYS[8]) == call_id and 'DONE' or 'OTHER'
end
local usage = record.state == COMPLETED and record.counted and read_usage(KEYS[6], record.deadline, remembered_until(record))
if record.state ~= COMPLETED then
  leave_indexes(KEYS, record, name)
end
redis.call('DEL', KEYS[1])
close_journal(KEYS[9], KEYS[6], record)
-- After a write that needs no memory: see leave_indexes in lib/write.
redis.call('SET', KEYS[8], call_id, 'PX', ttl)
if usage then
  remove_record(KEYS[6], usage, counted_size(record.bytes, record.head + 1))
end
notify(record, name)
return 'DONE'

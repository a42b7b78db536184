-- Quarantine a paused or abandoned record, because no retry has resumed it in time.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, 8 journal
-- ARGV: 1 now, 2 name, 3 token and 4 deadline in ms as they were seen, 5 when the lease must have ended, in microseconds,
--   6 reason with its length before it
-- Returns: 'DONE' | 'OTHER'
-- Durable: no
-- Transitions: processing -> quarantined
-- @include lib/time
-- @include lib/snapshot
-- @include lib/journal
-- @include lib/quarantine

local now, name, token, deadline, horizon, reason =
  time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]

local record = as_seen(redis.call('GET', KEYS[1]), '1', token, deadline, now)
if not record or not record.takeover or record.deadline * 1000 > math.min(horizon, now) then
  return 'OTHER'
end
local journal, word = journal_of(KEYS[8], record)
-- An unreadable journal may have an effect.
if word ~= 'CORRUPT' and not (journal and journal.steps > 0) then
  return 'OTHER'
end
quarantine(KEYS, record, name, reason, now)
return 'DONE'

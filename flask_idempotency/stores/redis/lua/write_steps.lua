-- Enter steps that have begun or finished, withdraw those that did nothing, set whether other attempts may go on, and renew
-- the worker's lease. A write whose number is not above the last one of this fence changes nothing.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, 8 journal
-- ARGV: 1 now, 2 name, 3 token, 4 fence in seven bytes, 5 number of this write, 6 lease in microseconds,
--   7 in_doubt: '1' or '0', 8 entries with effects after this write, 9 number of ids to withdraw, then these ids, and of each
--   entry five arguments as lib/step lists them...
-- Returns: 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT' | 'ERASED' | 'KEYLESS'
-- Durable: yes
-- Transitions: processing -> processing, quarantined -> processing
-- @include lib/time
-- @include lib/owner
-- @include lib/step
-- @include lib/notify
-- @include lib/write

local now, name, token, fence, number, lease, in_doubt, steps, withdrawn =
  time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == '1', tonumber(ARGV[8]),
  tonumber(ARGV[9])

local bytes = redis.call('GET', KEYS[1])
local record, refused = owned_record(KEYS, bytes, token, now)
if not record then
  return refused
end
local is_late = record.state == QUARANTINED and string.sub(bytes, record.head + 1) == LEASE_EXPIRED
-- The token alone is not enough: a claim that was sent twice may be granted again, after others had the key.
if string.sub(bytes, 18, 24) ~= fence or not (record.state == PROCESSING or is_late) then
  return 'LOST'
end
local journal, word = journal_of(KEYS[8], record)
if word == 'CORRUPT' then
  return word
end
if journal and journal.fence == fence and number <= journal.write then
  return 'DONE'
end
local takeover = not in_doubt
if takeover and not record.takeover then
  -- A claim from before a data loss is never taken over: its worker goes on, and no other does.
  local superseded, unknown = is_superseded(KEYS[4], read_number(bytes, 18, 24))
  if superseded and unknown then
    return 'DOUBT'
  end
  takeover = not superseded
end
local leftover, first = word == 'OTHER', 10 + withdrawn
local known
known, refused = known_entries(KEYS[8], KEYS[7], record, ARGV, 10, first)
if not known then
  return refused
end
if leftover then
  known = {}
end

check_indexes(KEYS, record)
redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
if leftover then
  redis.call('UNLINK', KEYS[8])
end
journal = journal or { size = 0, entries = 0, places = 0 }
journal.fence, journal.write, journal.steps, journal.in_doubt = fence, number, steps, in_doubt
change_steps(KEYS, record, journal, known, ARGV, 10, first, fence, now)

local deadline = math.max(record.deadline, math.ceil((now + lease) / 1000))
local stays = is_late and in_doubt
if is_late and not stays then
  redis.call('ZREM', KEYS[3], name)
end
if not stays then
  enter_in_flight(KEYS, record, name, deadline)
end
local first_of_record = first_byte(stays and QUARANTINED or PROCESSING, takeover, has_waiters(record), record.counted)
redis.call('SET', KEYS[1], rewritten(record, first_of_record, deadline, NO_RESULT, stays and LEASE_EXPIRED or ''))
return 'DONE'

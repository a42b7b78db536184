-- Let the key run again, as far as that is safe. A record whose journal has an effect stays: it is paused, so its lease ends
-- now, its token is spent, and the next retry resumes it. It is quarantined instead if a plain step is in doubt.
--
-- Redis grants this token no claim from now on: a claim that still travels has no worker any more, and would hold the key
-- until its lease expires.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, 8 cancelled,
--   9 journal
-- ARGV: 1 now, 2 name, 3 token, 4 for how many ms to remember that, 5 token of a paused record, 6 reason of one in doubt
--   with its length before it
-- Returns: 'DONE' | 'PAUSED' | 'HELD' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT'
-- Durable: yes
-- Transitions: processing -> absent, quarantined -> absent, processing -> processing, quarantined -> processing,
--   processing -> quarantined
-- @include lib/time
-- @include lib/owner
-- @include lib/finished
-- @include lib/notify
-- @include lib/journal

local now, name, token, ttl = time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]

local bytes = redis.call('GET', KEYS[1])
local record, refused = owned_record(KEYS, bytes, token, now)
if not record and refused == 'CORRUPT' then
  return refused
end
if not record and bytes and string.sub(bytes, 2, 17) == ARGV[5] then
  -- This very call has paused it before, and its reply was lost.
  return 'PAUSED'
end
local finished = record and finished_word(record)
if finished then
  return finished
end
local journal, word
if record then
  journal, word = journal_of(KEYS[9], record)
  if word == 'CORRUPT' then
    return word
  end
  if journal and journal.steps == 0 then
    journal, word = nil, 'OTHER'
  end
end
if journal and record.takeover then
  redis.call('ZCARD', KEYS[2]) -- A wrong type must fail before the first write.
  leave_indexes(KEYS, record, name)
  local deadline = math.min(record.deadline, math.floor(now / 1000))
  enter_in_flight(KEYS, record, name, deadline)
  local paused = { bytes = string.sub(bytes, 1, 1) .. ARGV[5] .. string.sub(bytes, 18), head = record.head }
  local first = first_byte(PROCESSING, true, false, record.counted)
  redis.call('SET', KEYS[1], rewritten(paused, first, deadline, NO_RESULT, ''))
elseif journal and record.state == PROCESSING then
  -- @include lib/quarantine
  -- Without a step in doubt, only a data loss keeps other attempts out.
  quarantine(KEYS, record, name, journal.in_doubt and ARGV[6] or MEMORY_LOST, now)
elseif record and not journal then
  leave_indexes(KEYS, record, name)
  redis.call('DEL', KEYS[1])
  if word then
    close_journal(KEYS[9], KEYS[6], record)
  end
end
redis.call('PERSIST', KEYS[8]) -- Needs no memory: see leave_indexes in lib/write.
redis.call('SET', KEYS[8], '', 'PX', ttl)
if record and not (journal and not record.takeover) then
  notify(record, name)
end
if not journal then
  return record and 'DONE' or refused
end
return record.takeover and 'PAUSED' or 'HELD'

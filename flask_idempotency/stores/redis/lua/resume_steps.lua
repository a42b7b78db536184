-- Settle steps in the worker's place. Unless a plain step stays in doubt, pause the record: the next retry resumes it.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, 8 journal
-- ARGV: 1 now, 2 name, 3 new token, as they were seen: 4 token, 5 deadline in ms, 6 fence in seven bytes and 7 number of the
--   last write; then 8 in_doubt: '1' or '0', 9 entries with effects after this write, 10 number of ids to withdraw, then
--   these ids, and of each entry five arguments as lib/step lists them...
-- Returns: 'DONE' | 'OTHER' | 'DOUBT' | 'CORRUPT' | 'ERASED' | 'KEYLESS'
-- Durable: yes
-- Transitions: quarantined -> processing
-- @include lib/time
-- @include lib/snapshot
-- @include lib/finished
-- @include lib/owner
-- @include lib/step
-- @include lib/write

local now, name, new_token, token, deadline, fence = time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local number, in_doubt, steps, withdrawn = tonumber(ARGV[7]), ARGV[8] == '1', tonumber(ARGV[9]), tonumber(ARGV[10])

local bytes = redis.call('GET', KEYS[1])
local found = bytes and parse_record(bytes)
if found and found.state ~= COMPLETED and found.token == new_token then
  -- This very call has settled it before, and its reply was lost.
  return 'DONE'
end
local record = as_seen(bytes, '3', token, deadline, now)
-- A completed record that was marked corrupt has no steps to resume.
if not record or finished_word(record) or string.sub(bytes, record.head + 1) == '\7corrupt' then
  return 'OTHER'
end
local journal, word = journal_of(KEYS[8], record)
if word == 'CORRUPT' then
  return word
end
if not journal or journal.fence ~= fence or journal.write ~= number then
  return 'OTHER'
end
local superseded, unknown = is_superseded(KEYS[4], read_number(fence, 1, 7))
if superseded then
  -- The journal may lack a step that has happened, so only the whole request can be resolved.
  return unknown and 'DOUBT' or 'OTHER'
end
local first = 11 + withdrawn
local known, refused = known_entries(KEYS[8], KEYS[7], record, ARGV, 11, first)
if not known then
  return refused
end

check_indexes(KEYS, record)
redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
journal.write, journal.steps, journal.in_doubt = number + 1, steps, in_doubt
change_steps(KEYS, record, journal, known, ARGV, 11, first, nil, now)

-- From here on the worker's token is worthless, and its next call fails with LeaseLost.
record.bytes = string.sub(bytes, 1, 1) .. new_token .. string.sub(bytes, 18)
if in_doubt then
  redis.call('SET', KEYS[1], record.bytes)
  return 'DONE'
end
leave_indexes(KEYS, record, name)
local now_ms = math.floor(now / 1000)
enter_in_flight(KEYS, record, name, now_ms)
redis.call('SET', KEYS[1], rewritten(record, first_byte(PROCESSING, true, false, record.counted), now_ms, NO_RESULT, ''))
return 'DONE'

-- Replace one entry of a journal that is still as it was read: to seal its result again, or to wipe it.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, 8 journal
-- ARGV: 1 now, 2 name, 3 id, 4 entry as it was read, 5 size of the new one, 6 number of its data key or '0', 7 its bytes as
--   Python wrote them
-- Returns: 'DONE' | 'OTHER' | 'ERASED' | 'KEYLESS' | 'CORRUPT'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/step

local now, id, expected, size, key_number, new =
  time_now(ARGV[1]), ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[7]

local bytes = redis.call('GET', KEYS[1])
local record = bytes and parse_record(bytes)
if not record or record.state == COMPLETED or is_expired(record, now) then
  return 'OTHER'
end
local journal, word = journal_of(KEYS[8], record)
if not journal or redis.call('HGET', KEYS[8], id) ~= expected then
  return word == 'CORRUPT' and word or 'OTHER'
end
local refused = data_key_refusal(KEYS[7], record, key_number)
if refused then
  return refused
end
local change = size - read_number(expected, 31, 35)
local head = string.sub(new, 1, 1) .. string.sub(expected, 2, 30) .. big_endian(size, 5)
redis.call('HSET', KEYS[8], id, head .. sum_of(head) .. string.sub(new, 2))
if change ~= 0 then
  journal.size = math.max(journal.size + change, 0)
  save_journal(KEYS[8], record, journal)
end
if record.counted then
  count_journal(KEYS[6], change)
end
return 'DONE'

-- Read a record's journal. Read-only.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys, 8 journal
-- ARGV: 1 now, 2 name, 3 token and 4 fence in seven bytes of the claim that must hold the record, both '' for any record
-- Returns: {complete: 1 or 0, when the request was made in ms, erasure or false, fence, number of the last write,
--   {ids and entries, and the journal's own field}}
--   | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/owner
-- @include lib/journal
-- @layout ERASURE

local now, token, fence = time_now(ARGV[1]), ARGV[3], ARGV[4]

local bytes = redis.call('GET', KEYS[1])
local record = bytes and parse_record(bytes)
if bytes and not record then
  return 'CORRUPT'
end
if not record or is_expired(record, now) then
  return 'ABSENT'
end
if token ~= '' and (record.state == COMPLETED or record.token ~= token or string.sub(bytes, 18, 24) ~= fence) then
  return 'LOST'
end
if record.state == COMPLETED then
  -- An earlier release may have left a journal beside its response.
  return 'ABSENT'
end
local journal, word = journal_of(KEYS[8], record)
if word == 'CORRUPT' then
  return word
end
local fields = journal and redis.call('HGETALL', KEYS[8]) or {}
if journal and #fields ~= 2 * journal.entries + 2 then
  return 'CORRUPT'
end
local last = journal and journal.fence or string.sub(bytes, 18, 24)
local superseded, unknown = is_superseded(KEYS[4], read_number(last, 1, 7))
if superseded and unknown then
  return 'DOUBT'
end
return {
  superseded and 0 or 1,
  requested_at(record),
  redis.call('HGET', KEYS[7], ERASURE),
  journal and journal.fence or '',
  journal and journal.write or 0,
  fields,
}

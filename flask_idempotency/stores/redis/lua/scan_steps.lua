-- Read the journals of some records. Read-only.
--
-- KEYS: of each record its key and that of its journal...
-- ARGV: 1 now
-- Returns: of each record {tid, token, fingerprint, when its request was made in ms, {ids and entries, and the journal's own
--   field}}, or '' if it has no journal or one of them is unreadable
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/head
-- @include lib/journal

local now = time_now(ARGV[1])

local found = {}
for i = 1, #KEYS, 2 do
  local bytes, record = read_head(KEYS[i])
  local journal = record and record.state ~= COMPLETED and not is_expired(record, now) and journal_of(KEYS[i + 1], record)
  found[#found + 1] = journal
      and {
        string.sub(bytes, 62, 77),
        record.token,
        record.fingerprint,
        requested_at(record),
        redis.call('HGETALL', KEYS[i + 1]),
      }
    or ''
end
return found

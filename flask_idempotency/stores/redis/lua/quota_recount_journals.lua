-- Count the bytes of the journals that a tenant's quota must count. Read-only.
--
-- KEYS: of each record of its partition its key and that of its journal...
-- ARGV: 1 not used, 2 tid
-- Returns: bytes
-- Durable: no
-- Transitions: none
-- @include lib/head
-- @include lib/journal

local tid = ARGV[2]

local sum = 0
for i = 1, #KEYS, 2 do
  local bytes, record = read_head(KEYS[i])
  if record and record.counted and record.state ~= COMPLETED and string.sub(bytes, 62, 77) == tid then
    local journal = journal_of(KEYS[i + 1], record)
    sum = sum + (journal and journal.size or 0)
  end
end
return sum

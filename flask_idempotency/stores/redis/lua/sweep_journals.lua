-- Remove journals whose record is gone, is completed, or belongs to another life of its key.
--
-- KEYS: of each journal the key of its record and its own...
-- ARGV: 1 not used
-- Returns: how many were removed
-- Durable: no
-- Transitions: none
-- @include lib/head
-- @include lib/journal

local removed = 0
for i = 1, #KEYS, 2 do
  local bytes, record = read_head(KEYS[i])
  local gone = bytes == ''
  if record then
    local _, word = journal_of(KEYS[i + 1], record)
    gone = record.state == COMPLETED or word == 'OTHER'
  end
  if gone then
    removed = removed + redis.call('UNLINK', KEYS[i + 1])
  end
end
return removed

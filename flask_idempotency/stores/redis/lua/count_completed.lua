-- Count the completed ones of some records. Read-only.
--
-- KEYS: records...
-- ARGV: 1 not used
-- Returns: how many
-- Durable: no
-- Transitions: none
-- @include lib/head

local completed = 0
for _, key in ipairs(KEYS) do
  local _, record = read_head(key)
  if record and record.state == COMPLETED then
    completed = completed + 1
  end
end
return completed

-- Read some minutes or hours. Read-only.
--
-- KEYS: buckets...
-- ARGV: 1 not used
-- Returns: of each bucket a JSON object, '{}' if it is empty, or another text if it is damaged
-- Durable: no
-- Transitions: none

local found = {}
for i, key in ipairs(KEYS) do
  -- A key of another type must not hide the other buckets. The error has no fields.
  local fields = redis.pcall('HGETALL', key)
  local text = ''
  for j = 1, #fields, 2 do
    text = text .. ',' .. fields[j] .. ':' .. fields[j + 1]
  end
  found[i] = fields.err or '{' .. string.sub(text, 2) .. '}'
end
return found

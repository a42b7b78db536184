-- Read some minutes or hours. Read-only.
--
-- KEYS: buckets...
-- ARGV: 1 not used
-- Returns: of each bucket a JSON object, '{}' if it is empty
-- Durable: no
-- Transitions: none

local found = {}
for i, key in ipairs(KEYS) do
  local fields = redis.call('HGETALL', key)
  local text = ''
  for j = 1, #fields, 2 do
    text = text .. ',' .. fields[j] .. ':' .. fields[j + 1]
  end
  found[i] = '{' .. string.sub(text, 2) .. '}'
end
return found

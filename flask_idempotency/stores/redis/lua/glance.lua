-- The beginning of a record. Its answer may be long, and everybody else waits while a script reads it.

-- Enough for whom most records are about. Behind that come three lengths, of at most nine bytes each.
local GLANCE, LENGTHS, LONGEST_ABOUT = 512, 27, 4 * 65539

-- nil for what is of another type, '' for what is absent.
local function glance(key)
  local bytes = redis.pcall('GETRANGE', key, 0, GLANCE - 1)
  if type(bytes) ~= 'string' then
    return nil
  end
  if #bytes == GLANCE then
    local about = number(bytes, HEADER + 1, HEADER + 3)
    local enough = HEADER + 3 + about + LENGTHS
    if about <= LONGEST_ABOUT and enough > GLANCE then
      return redis.call('GETRANGE', key, 0, enough - 1)
    end
  end
  return bytes
end


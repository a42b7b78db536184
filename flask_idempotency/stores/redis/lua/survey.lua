-- The completed ones of some records, without their answers, and the time. Writes nothing.
--
-- KEYS: records
-- ARGV: 1 now in microseconds, or '' for the server's own time
-- Returns {now, and of each of the records its length, and what there is of it before the answer, '' if it is not completed}

-- Where the answer begins; nil where that cannot be read.
local function answer_at(bytes, at)
  local _, key_at = length_at(bytes, at)
  if not key_at then
    return nil
  end
  local key_number, id_at = length_at(bytes, key_at)
  if not key_number or key_number == 0 then
    return id_at
  end
  local size, id = length_at(bytes, id_at)
  return size and id + size
end

local found = { now }
for i, key in ipairs(KEYS) do
  local bytes, length = glance(key), 0
  local record = bytes and parsed(bytes)
  if record and record.state == COMPLETED then
    local at = answer_at(bytes, record.head + 1)
    length = #bytes < GLANCE and #bytes or redis.call('STRLEN', key)
    if at and at - 1 <= #bytes then
      bytes = string.sub(bytes, 1, at - 1)
    else
      -- A long name of a key; or nobody here can tell, which is hardly ever, and then it is told whole.
      bytes = redis.call('GETRANGE', key, 0, at and at - 2 or -1)
    end
  else
    bytes = ''
  end
  found[2 * i], found[2 * i + 1] = length, bytes
end
return found

-- Until when a completed record is remembered after its response has expired. It stands behind its last text, because the
-- release before reads that text whole: it replays the response, and then finds a record that it must not run again.
-- @include lib/record

local UNTIL, UNTIL_SIZE = '\0~', 17

-- Return that time in ms. Return nil for a record that ends with its response.
local function remembered_until(record)
  local at = record.head - UNTIL_SIZE + 1
  if at <= HEADER + 3 or string.sub(record.bytes, at, at + 1) ~= UNTIL then
    return nil
  end
  local digits = string.sub(record.bytes, at + 2, record.head)
  return string.find(digits, '^%d+$') and tonumber(digits) or nil
end

-- Return whether only the fact of completion is remembered.
local function is_skeleton(record, now)
  return is_expired(record, now) and (remembered_until(record) or 0) * 1000 > now
end

-- Compares a record with what a janitor or an operator saw of it before: they may change only that.
-- @include lib/remembered

local STATES = { ['1'] = PROCESSING, ['2'] = COMPLETED, ['3'] = QUARANTINED }

-- Return the record if it is as it was seen. Return nil if it changed, or if it expired and is not remembered.
local function as_seen(bytes, state, token, deadline, now)
  local record = bytes and parse_record(bytes)
  local present = record and (not is_expired(record, now) or is_skeleton(record, now))
  if present and record.state == STATES[state] and record.token == token then
    return record.deadline == tonumber(deadline) and record or nil
  end
  return nil
end

-- What others than a record's owner may do: change what they have seen, if it still is.

local STATES = { ['1'] = PROCESSING, ['2'] = COMPLETED, ['3'] = QUARANTINED }

-- The record, if it stands as it was seen. nil for anything else, and for an answer whose life is over.
local function as_seen(bytes, state, token, deadline)
  local record = bytes and parsed(bytes)
  if record and not expired(record) and record.state == STATES[state] and record.token == token then
    return record.deadline == tonumber(deadline) and record or nil
  end
  return nil
end


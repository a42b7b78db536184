-- Whether a record's work is done, whatever has become of its answer.

-- The word for an owner who would have it otherwise: 'LOST' where the record is completed, or was condemned since, and
-- 'CORRUPT' where it does not say. nil while it may still be anything.
local function answered(record)
  if record.state == PROCESSING then
    return nil
  end
  -- A status or a duration is in nothing that was not completed: also where the state or the reason is damaged.
  if record.state == COMPLETED or string.sub(record.bytes, 55, 61) ~= NO_RESULT then
    return 'LOST'
  end
  local size, at = length_at(record.bytes, record.head + 1)
  if not size or at + size - 1 > #record.bytes then
    return 'CORRUPT'
  end
  return at + size <= #record.bytes and 'LOST' or nil
end


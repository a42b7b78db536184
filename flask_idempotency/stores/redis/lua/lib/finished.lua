-- Whether the work of a record is done, whatever became of its response.
-- @include lib/length
-- @include lib/write

-- Return the word for a worker that wants another end: 'LOST' if the record is or was completed, 'CORRUPT' if that cannot
-- be read. Return nil if the record may still end in any way.
local function finished_word(record)
  if record.state == PROCESSING then
    return nil
  end
  -- Only a completion writes a status or a duration. They prove it even if the state or the reason is damaged.
  if record.state == COMPLETED or string.sub(record.bytes, 55, 61) ~= NO_RESULT then
    return 'LOST'
  end
  local size, at = length_at(record.bytes, record.head + 1)
  if not size or at + size - 1 > #record.bytes then
    return 'CORRUPT'
  end
  return at + size <= #record.bytes and 'LOST' or nil
end

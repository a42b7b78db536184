-- Wakes the requests that wait in other processes for this record's response.
-- @include lib/record
-- @layout CHANNEL

-- While a record is in flight, its success bit means that the claim allowed other requests to wait.
local function has_waiters(record)
  return record.state == PROCESSING and math.floor(string.byte(record.bytes, 1) / 2) % 2 == 1
end

-- Call this after the last write. If PUBLISH is forbidden, the record is still saved.
local function notify(record, name)
  if has_waiters(record) then
    redis.pcall('PUBLISH', CHANNEL, name)
  end
end

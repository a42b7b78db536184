-- What the worker that holds a claim may do to its record, whatever the state of the server.
-- @include lib/record
-- @include lib/process
-- @layout STORE_ID PROCESS REPLICATION_ID FENCE_AT_LOSS LOSSLESS

-- Return whether Redis may have lost what was written since the claim of this fence, such as a take-over; and whether only a
-- client can tell, because it must judge a restart first: see store_status.
local function is_superseded(partition, fence)
  local memory = redis.call('HMGET', partition, STORE_ID, PROCESS, REPLICATION_ID, FENCE_AT_LOSS, LOSSLESS)
  local _, _, changed = handed_over(memory[2], memory[3])
  local superseded = not memory[1] or changed or fence <= (tonumber(memory[4]) or 0)
  return superseded, changed and memory[5] and memory[5] == memory[2]
end

-- Return the record of these bytes if this token may write to it, else nil and the word for the worker.
local function owned_record(keys, bytes, token, now)
  if not bytes then
    return nil, 'ABSENT'
  end
  local record = parse_record(bytes)
  if not record then
    return nil, 'CORRUPT'
  end
  if is_expired(record, now) then
    return nil, 'ABSENT'
  end
  if record.token ~= token then
    return nil, 'LOST'
  end
  if record.takeover and record.state ~= COMPLETED then
    local superseded, in_doubt = is_superseded(keys[4], read_number(record.bytes, 18, 24))
    if superseded then
      return nil, in_doubt and 'DOUBT' or 'LOST'
    end
  end
  return record
end

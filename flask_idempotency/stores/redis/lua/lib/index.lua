-- Reads the records that the indexes of a partition name, and corrects the indexes where they are wrong.
-- @include lib/head

-- Return the head of the record with this name, and the record, if it can be read and has this state.
--
-- If the record is gone or has another state, take its name out of the index and put it into the one where it belongs.
-- A record that cannot be read stays in the index. `in_flight` and `quarantined` are the indexes.
local function indexed_record(in_flight, quarantined, state, name, key, now)
  local bytes, record = read_head(key)
  if record and record.state == state then
    return bytes, record
  end
  if record or redis.call('EXISTS', key) == 0 then
    -- A wrong type must fail before the first write, and the first write must need no memory.
    redis.call('ZCARD', in_flight)
    redis.call('ZCARD', quarantined)
    redis.call('ZREM', state == PROCESSING and in_flight or quarantined, name)
    if record and record.state == PROCESSING then
      redis.call('ZADD', in_flight, 'NX', string.format('%.0f', record.deadline), name)
    elseif record and record.state == QUARANTINED then
      redis.call('ZADD', quarantined, 'NX', string.format('%.0f', math.floor(now / 1000)), name)
    end
  end
  return nil
end

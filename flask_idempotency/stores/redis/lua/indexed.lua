-- What the indexes of a partition name, and putting them right where they are not.

-- KEYS of every script that uses this: 1 in-flight index, 2 quarantine index, then records of the partition

-- The beginning of the record of this name, and what scripts look at of it, if it can be read and is in this state. A name
-- whose record is gone or has another state is taken out of the index, and put into the one where it belongs. What
-- cannot be read stays.
local function indexed(state, name, key)
  local bytes = glance(key)
  local record = bytes and parsed(bytes)
  if record and record.state == state then
    return bytes, record
  end
  if record or redis.call('EXISTS', key) == 0 then
    -- An error of type must come before the first write, and the first write must need no memory.
    redis.call('ZCARD', KEYS[1])
    redis.call('ZCARD', KEYS[2])
    redis.call('ZREM', KEYS[state == PROCESSING and 1 or 2], name)
    if record and record.state == PROCESSING then
      redis.call('ZADD', KEYS[1], 'NX', string.format('%.0f', record.deadline), name)
    elseif record and record.state == QUARANTINED then
      redis.call('ZADD', KEYS[2], 'NX', string.format('%.0f', math.floor(now / 1000)), name)
    end
  end
  return nil
end


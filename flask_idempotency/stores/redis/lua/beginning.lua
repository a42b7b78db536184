-- A record without its answer.

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

-- What there is of a record before its answer, given what `glance` has read and where the result begins.
local function beginning(key, bytes, at)
  local answer = answer_at(bytes, at)
  if answer and answer - 1 <= #bytes then
    return string.sub(bytes, 1, answer - 1)
  end
  -- A long name of a key; or nobody here can tell, which is hardly ever, and then it is told whole.
  return redis.call('GETRANGE', key, 0, answer and answer - 2 or -1)
end


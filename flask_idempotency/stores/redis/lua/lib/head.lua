-- The head of a record. A response may be long, and every other client waits while a script reads it.
-- @include lib/length
-- @include lib/record

-- Most records have their request info within the first 512 bytes. Three lengths follow it, of at most nine bytes each.
local HEAD, LENGTHS, LONGEST_INFO = 512, 27, 4 * 65539 + 17

-- Return the head of the record: '' if the key is absent, nil if it has another type; and the record, if it can be read.
local function read_head(key)
  local bytes = redis.pcall('GETRANGE', key, 0, HEAD - 1)
  if type(bytes) ~= 'string' then
    return nil
  end
  if #bytes == HEAD then
    local info = read_number(bytes, HEADER + 1, HEADER + 3)
    local enough = HEADER + 3 + info + LENGTHS
    if info <= LONGEST_INFO and enough > HEAD then
      bytes = redis.call('GETRANGE', key, 0, enough - 1)
    end
  end
  return bytes, parse_record(bytes)
end

-- Return where the response's own bytes begin, after its size and its data key. Return nil if that cannot be read.
local function payload_at(bytes, at)
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

-- Return the record up to its payload, from the head that `read_head` returned and the place where the result begins.
local function without_payload(key, bytes, at)
  local payload = payload_at(bytes, at)
  if payload and payload - 1 <= #bytes then
    return string.sub(bytes, 1, payload - 1)
  end
  -- The data key has a long id; or the place cannot be read, which is rare, and then the caller gets the whole record.
  return redis.call('GETRANGE', key, 0, payload and payload - 2 or -1)
end

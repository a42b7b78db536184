-- Whether an answer may be stored that is sealed with a tenant's data key.

-- nil when it may, else the word to answer with. Number '0' needs no key.
local function key_refused(record, key_number)
  if key_number == '0' then
    return nil
  end
  local found = redis.call('HMGET', KEYS[7], SHRED, key_number, CLOSED .. key_number)
  if found[1] then
    local erased_at = string.match(found[1], '^%d+ (%d+)$')
    if not erased_at then
      return 'CORRUPT'
    end
    if requested(record) * 1000 <= tonumber(erased_at) then
      return 'ERASED'
    end
  end
  if not found[2] or found[3] then
    return 'KEYLESS'
  end
  return nil
end


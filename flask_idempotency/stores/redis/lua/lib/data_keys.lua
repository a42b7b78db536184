-- The data keys of a tenant, which seal its responses.
-- @include lib/record
-- @layout ERASURE DISABLED

-- Return nil if a response that is sealed with this data key may be stored, else the word for the worker. Number '0' stands
-- for a response that no data key seals.
local function data_key_refusal(tenant_keys, record, key_number)
  if key_number == '0' then
    return nil
  end
  local found = redis.call('HMGET', tenant_keys, ERASURE, key_number, DISABLED .. key_number)
  if found[1] then
    local erased_at = string.match(found[1], '^%d+ (%d+)$')
    if not erased_at then
      return 'CORRUPT'
    end
    if requested_at(record) * 1000 <= tonumber(erased_at) then
      return 'ERASED'
    end
  end
  if not found[2] or found[3] then
    return 'KEYLESS'
  end
  return nil
end

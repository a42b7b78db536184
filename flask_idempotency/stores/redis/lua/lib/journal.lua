-- The journal of a record: what is known of the steps of its request. redis/step_encoding.py draws the format.
-- @include lib/number
-- @include lib/record
-- @layout JOURNALS

local META = 31
-- A reason with its length before it: the journal may lack a step, because Redis lost data after the claim.
local MEMORY_LOST = '\11memory-lost'

-- Return the sum of these bytes in two bytes. It differs if one bit of them has flipped.
local function sum_of(bytes)
  local sum, all = 0, { string.byte(bytes, 1, -1) }
  for at = 1, #all do
    sum = sum + all[at]
  end
  return big_endian(sum, 2)
end

-- Return the journal of this life of the record, or nil and a word: 'CORRUPT', or 'OTHER' for one that another life of the
-- key has left. Return nil alone if there is none. Read-only.
local function journal_of(key, record)
  local meta = redis.pcall('HGET', key, '')
  if not meta and redis.call('EXISTS', key) == 0 then
    return nil
  end
  if type(meta) ~= 'string' or #meta ~= META or sum_of(string.sub(meta, 1, META - 2)) ~= string.sub(meta, -2) then
    return nil, 'CORRUPT'
  end
  if string.sub(meta, 1, 6) ~= string.sub(record.bytes, 43, 48) then
    return nil, 'OTHER'
  end
  return {
    fence = string.sub(meta, 7, 13),
    write = read_number(meta, 14, 17),
    size = read_number(meta, 18, 22),
    steps = read_number(meta, 23, 24),
    entries = read_number(meta, 25, 26),
    places = read_number(meta, 27, 28),
    in_doubt = string.sub(meta, 29, 29) == '1',
  }
end

local function save_journal(key, record, journal)
  local meta = string.sub(record.bytes, 43, 48)
    .. journal.fence
    .. big_endian(journal.write, 4)
    .. big_endian(journal.size, 5)
    .. big_endian(journal.steps, 2)
    .. big_endian(journal.entries, 2)
    .. big_endian(journal.places, 2)
    .. (journal.in_doubt and '1' or '0')
  redis.call('HSET', key, '', meta .. sum_of(meta))
end

-- Add to the bytes that the journals of a tenant have. A count that cannot be read stays as it is.
local function count_journal(tenant_quota, change)
  local count = redis.pcall('HGET', tenant_quota, JOURNALS) or '0'
  if change ~= 0 and type(count) == 'string' and string.find(count, '^%d+$') then
    redis.call('HSET', tenant_quota, JOURNALS, decimal(math.max(tonumber(count) + change, 0)))
  end
end

-- Remove the journal, and count it down. Call this after a write that needs no memory.
local function close_journal(key, tenant_quota, record)
  local journal, word = journal_of(key, record)
  if journal and record.counted then
    count_journal(tenant_quota, -journal.size)
  end
  if journal or word then
    redis.call('UNLINK', key)
  end
end

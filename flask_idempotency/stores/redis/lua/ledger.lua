-- What a tenant has of completed records: counted by the bucket in which their life ends, and in totals of all buckets.
-- Fields and their texts are described in layout.py.

-- nil where they cannot be read. `lowest` is 0 when there is no bucket.
local function totals_of(text)
  if not text then
    return { records = 0, bytes = 0, lowest = 0 }
  end
  local records, bytes, lowest = string.match(text, '^(%d+) (%d+) (%d+)$')
  return records and { records = tonumber(records), bytes = tonumber(bytes), lowest = tonumber(lowest) }
end

local function put_totals(ledger, totals)
  local text = decimal(totals.records) .. ' ' .. decimal(totals.bytes) .. ' ' .. decimal(totals.lowest)
  redis.call('HSET', ledger, TOTALS, text)
end

local function bucket_of(text)
  local records, bytes = string.match(text or '', '^(%d+) (%d+)$')
  return tonumber(records or '0'), tonumber(bytes or '0')
end

local function edge_of(field)
  local edge = string.match(field, '^' .. BUCKET .. '(%d+)$')
  return edge and tonumber(edge)
end

-- What there is of one more record, or one less, in the bucket that ends at this edge. Nothing is written: an error of
-- type must come before the first write.
local function looked_up(edge)
  local field = BUCKET .. decimal(edge)
  local found = redis.call('HMGET', KEYS[6], TOTALS, field)
  return { edge = edge, field = field, totals = totals_of(found[1]), bucket = found[2] }
end

-- Totals that cannot be read stay as they are: who has none is refused nothing.
local function put(books, records, bytes)
  redis.call('HSET', KEYS[6], books.field, decimal(records) .. ' ' .. decimal(bytes))
  if books.totals then
    put_totals(KEYS[6], books.totals)
  end
end

local function enter(books, size)
  local records, bytes = bucket_of(books.bucket)
  local totals = books.totals
  if totals then
    totals.records, totals.bytes = totals.records + 1, totals.bytes + size
    if totals.lowest == 0 or books.edge < totals.lowest then
      totals.lowest = books.edge
    end
  end
  put(books, records + 1, bytes + size)
end

local function leave(books, size)
  if not books.bucket then
    return
  end
  local records, bytes = bucket_of(books.bucket)
  local totals = books.totals
  if totals then
    totals.records = math.max(totals.records - 1, 0)
    totals.bytes = math.max(totals.bytes - size, 0)
  end
  put(books, math.max(records - 1, 0), math.max(bytes - size, 0))
end


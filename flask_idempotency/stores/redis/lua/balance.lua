-- Puts a tenant's ledger right by a recount of its completed records.
--
-- KEYS: 1 its ledger
-- ARGV: 1 now in microseconds, or '' for the server's own time; then of each bucket its edge in ms, what the ledger said
--   of it before the recount ('' for nothing), and what was counted, as the ledger would say it ('' for nothing)
-- Returns {records too many, bytes too many, buckets that have changed meanwhile}

-- Live buckets by their fields; the fields of the others, and what these had.
local function buckets()
  local live, ended, over = {}, {}, { records = 0, bytes = 0 }
  local fields = redis.call('HGETALL', KEYS[1])
  for i = 1, #fields, 2 do
    local edge = edge_of(fields[i])
    if edge and edge * 1000 > now then
      live[fields[i]] = fields[i + 1]
    elseif edge then
      local records, bytes = bucket_of(fields[i + 1])
      ended[#ended + 1] = fields[i]
      over.records, over.bytes = over.records + records, over.bytes + bytes
    end
  end
  return live, ended, over
end

local function summed(live)
  local totals = { records = 0, bytes = 0, lowest = 0 }
  for field, text in pairs(live) do
    local records, bytes = bucket_of(text)
    local edge = edge_of(field)
    totals.records, totals.bytes = totals.records + records, totals.bytes + bytes
    if totals.lowest == 0 or edge < totals.lowest then
      totals.lowest = edge
    end
  end
  return totals
end

local live, ended, over = buckets()
local said, busy = totals_of(redis.call('HGET', KEYS[1], TOTALS)) or over, 0
for i = 2, #ARGV, 3 do
  local field, before, counted = BUCKET .. ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if tonumber(ARGV[i]) * 1000 <= now then
    -- Over since the recount began: nothing is counted under it any more.
  elseif (live[field] or '') ~= before then
    busy = busy + 1
  elseif counted ~= before then
    if counted == '' then
      redis.call('HDEL', KEYS[1], field)
      live[field] = nil
    else
      redis.call('HSET', KEYS[1], field, counted)
      live[field] = counted
    end
  end
end
for _, field in ipairs(ended) do
  redis.call('HDEL', KEYS[1], field)
end
local totals = summed(live)
if redis.call('EXISTS', KEYS[1]) == 1 then
  put_totals(KEYS[1], totals)
end
return { said.records - over.records - totals.records, said.bytes - over.bytes - totals.bytes, busy }

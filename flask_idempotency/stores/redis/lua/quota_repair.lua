-- Correct a tenant's totals of completed records by a recount.
--
-- KEYS: 1 tenant_quota
-- ARGV: 1 now, then of each bucket its end in ms, its text before the recount and its text as counted, '' for no bucket...
-- Returns: {records too many, bytes too many, buckets that changed during the recount}
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/quota_totals

local now = time_now(ARGV[1])

-- The buckets whose life has not ended, by their fields; the other fields, and what these buckets had.
local live, ended, past = {}, {}, { records = 0, bytes = 0 }
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local bucket_end = bucket_end_of(fields[i])
  if bucket_end and bucket_end * 1000 > now then
    live[fields[i]] = fields[i + 1]
  elseif bucket_end then
    local records, bytes = parse_bucket(fields[i + 1])
    ended[#ended + 1] = fields[i]
    past.records, past.bytes = past.records + records, past.bytes + bytes
  end
end

local before, busy = parse_totals(redis.call('HGET', KEYS[1], TOTALS)) or past, 0
for i = 2, #ARGV, 3 do
  local field, text, counted = BUCKET .. ARGV[i], ARGV[i + 1], ARGV[i + 2]
  -- No record counts in a bucket that has ended since the recount began.
  if tonumber(ARGV[i]) * 1000 > now then
    if (live[field] or '') ~= text then
      busy = busy + 1
    elseif counted == '' and text ~= '' then
      redis.call('HDEL', KEYS[1], field)
      live[field] = nil
    elseif counted ~= text then
      redis.call('HSET', KEYS[1], field, counted)
      live[field] = counted
    end
  end
end
for _, field in ipairs(ended) do
  redis.call('HDEL', KEYS[1], field)
end

local totals = { records = 0, bytes = 0, lowest = 0 }
for field, text in pairs(live) do
  local records, bytes = parse_bucket(text)
  local bucket_end = bucket_end_of(field)
  totals.records, totals.bytes = totals.records + records, totals.bytes + bytes
  if totals.lowest == 0 or bucket_end < totals.lowest then
    totals.lowest = bucket_end
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  write_totals(KEYS[1], totals)
end
return { before.records - past.records - totals.records, before.bytes - past.bytes - totals.bytes, busy }

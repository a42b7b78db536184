-- How many completed records a tenant has, and their bytes: in buckets by when their life ends, and as totals of all
-- buckets. layout.py describes the fields and their texts.
-- @include lib/number
-- @layout TOTALS BUCKET

-- Return nil if the text cannot be read. `lowest` is 0 if there is no bucket.
local function parse_totals(text)
  if not text then
    return { records = 0, bytes = 0, lowest = 0 }
  end
  local records, bytes, lowest = string.match(text, '^(%d+) (%d+) (%d+)$')
  return records and { records = tonumber(records), bytes = tonumber(bytes), lowest = tonumber(lowest) }
end

local function write_totals(tenant_quota, totals)
  local text = decimal(totals.records) .. ' ' .. decimal(totals.bytes) .. ' ' .. decimal(totals.lowest)
  redis.call('HSET', tenant_quota, TOTALS, text)
end

-- Return the records and bytes of a bucket.
local function parse_bucket(text)
  local records, bytes = string.match(text or '', '^(%d+) (%d+)$')
  return tonumber(records or '0'), tonumber(bytes or '0')
end

-- Return when the bucket in this field ends, in ms. Return nil for another field.
local function bucket_end_of(field)
  local bucket_end = string.match(field, '^' .. BUCKET .. '(%d+)$')
  return bucket_end and tonumber(bucket_end)
end

-- Read what one more record, or one less, changes. Read-only, so that a wrong type fails before the first write. A record
-- that is remembered until a later time, in ms, counts there, and its bytes in the first bucket.
local function read_usage(tenant_quota, bucket_end, till)
  local field = BUCKET .. decimal(bucket_end)
  local found = redis.call('HMGET', tenant_quota, TOTALS, field)
  local usage = { bucket_end = bucket_end, field = field, totals = parse_totals(found[1]), bucket = found[2] }
  if till and till ~= bucket_end then
    usage.later = read_usage(tenant_quota, till)
    usage.later.totals = usage.totals
  end
  return usage
end

-- Totals that cannot be read stay as they are: without totals no limit of the tenant is reached.
local function write_usage(tenant_quota, usage, records, bytes)
  redis.call('HSET', tenant_quota, usage.field, decimal(records) .. ' ' .. decimal(bytes))
  if usage.totals then
    write_totals(tenant_quota, usage.totals)
  end
end

local function add_to_bucket(tenant_quota, usage, count, size)
  local records, bytes = parse_bucket(usage.bucket)
  local totals = usage.totals
  if totals then
    totals.records, totals.bytes = totals.records + count, totals.bytes + size
    if totals.lowest == 0 or usage.bucket_end < totals.lowest then
      totals.lowest = usage.bucket_end
    end
  end
  write_usage(tenant_quota, usage, records + count, bytes + size)
end

local function remove_from_bucket(tenant_quota, usage, count, size)
  if not usage.bucket then
    return
  end
  local records, bytes = parse_bucket(usage.bucket)
  local totals = usage.totals
  if totals then
    totals.records = math.max(totals.records - count, 0)
    totals.bytes = math.max(totals.bytes - size, 0)
  end
  write_usage(tenant_quota, usage, math.max(records - count, 0), math.max(bytes - size, 0))
end

local function add_record(tenant_quota, usage, size)
  add_to_bucket(tenant_quota, usage, usage.later and 0 or 1, size)
  if usage.later then
    add_to_bucket(tenant_quota, usage.later, 1, 0)
  end
end

local function remove_record(tenant_quota, usage, size)
  remove_from_bucket(tenant_quota, usage, usage.later and 0 or 1, size)
  if usage.later then
    remove_from_bucket(tenant_quota, usage.later, 1, 0)
  end
end

-- Whether a tenant may have one more key.
-- @include lib/quota_totals
-- @layout WINDOW LIMITS JOURNALS

-- Return the number of the window of this length that is open, as text.
local function window_number(length, now)
  return decimal((now - now % length) / length)
end

-- Return whether this field counts new keys of a window that has ended.
local function is_past_window(field, text, now)
  local length = string.match(field, '^' .. WINDOW .. '(%d*)$')
  if not length then
    return false
  end
  length = tonumber(length) or 0
  return length < 1 or string.match(text, '^%d+') ~= window_number(length, now)
end

-- Return the totals without the buckets that have ended, and the fields of these buckets and of windows that have ended.
-- Read-only, because a refusal must not write. It reads all fields only if a bucket has ended, or if the claim adds a
-- field for a window.
local function sweep(tenant_quota, totals, adds_window, now)
  if not adds_window and (totals.lowest == 0 or totals.lowest * 1000 > now) then
    return totals, {}
  end
  local left, ended = { records = totals.records, bytes = totals.bytes, lowest = 0 }, {}
  local fields = redis.call('HGETALL', tenant_quota)
  for i = 1, #fields, 2 do
    local bucket_end = bucket_end_of(fields[i])
    if bucket_end and bucket_end * 1000 <= now then
      local records, bytes = parse_bucket(fields[i + 1])
      left.records, left.bytes = math.max(left.records - records, 0), math.max(left.bytes - bytes, 0)
      ended[#ended + 1] = fields[i]
    elseif bucket_end and (left.lowest == 0 or bucket_end < left.lowest) then
      left.lowest = bucket_end
    elseif is_past_window(fields[i], fields[i + 1], now) then
      ended[#ended + 1] = fields[i]
    end
  end
  return left, ended
end

-- Return the limits in force: texts of digits, nil for no limit. `own` is what the operator set for this tenant, `defaults`
-- what the application sent. Return nil if the tenant's own limits cannot be read.
local function limits_of(own, defaults)
  if own then
    local records, bytes, in_flight, count, length = string.match(own, '^(%d*),(%d*),(%d*),(%d*),(%d*),')
    if not records or (count ~= '' and (tonumber(length) or 0) < 1) then
      return nil
    end
    own = { records, bytes, in_flight, count, length }
  end
  local limits = {}
  for i = 1, 4 do
    local text = own and own[i] ~= '' and own[i] or defaults[i]
    limits[i] = text ~= '' and text or nil
  end
  -- The number of new keys and the length of their window are one limit.
  limits[5] = own and own[4] ~= '' and own[5] or defaults[5]
  return limits
end

-- Return how many new keys the open window of this length has. Each length has a count, so that two limits with different
-- windows do not reset each other.
local function read_window(tenant_quota, length, now)
  local open, field = window_number(length, now), WINDOW .. decimal(length)
  local text = redis.call('HGET', tenant_quota, field)
  local number, count = string.match(text or '', '^(%d+) (%d+)$')
  return {
    field = field,
    number = open,
    count = number == open and tonumber(count) or 0,
    left = length - now % length,
    is_new = not text,
  }
end

-- Return a tenant's limits and usage as a new key needs them, nil if they cannot be read. Read-only.
local function read_quota(tenant_quota, tenant_unfinished, defaults, now)
  local found = redis.call('HMGET', tenant_quota, TOTALS, LIMITS, JOURNALS)
  local totals, limits = parse_totals(found[1]), limits_of(found[2], defaults)
  local journals = string.match(found[3] or '0', '^%d+$')
  if not totals or not limits or not journals then
    return nil
  end
  local quota = { limits = limits, journals = tonumber(journals), unfinished = redis.call('ZCARD', tenant_unfinished) }
  quota.window = limits[4] and read_window(tenant_quota, tonumber(limits[5]), now)
  quota.totals, quota.ended = sweep(tenant_quota, totals, quota.window and quota.window.is_new, now)
  return quota
end

-- Return nil if the tenant may have one more key, else which limit it has reached, what that allows, in how many
-- microseconds there may be room, and the length of the window.
local function quota_refusal(quota, tenant_unfinished, now)
  local limits, totals = quota.limits, quota.totals
  local ends = totals.lowest > 0 and totals.lowest * 1000 - now or 0
  if limits[1] and quota.unfinished + totals.records >= tonumber(limits[1]) then
    return { 'OVER-QUOTA', 'records', limits[1], ends, 0 }
  end
  if limits[2] and totals.bytes + quota.journals >= tonumber(limits[2]) then
    return { 'OVER-QUOTA', 'bytes', limits[2], ends, 0 }
  end
  if limits[3] then
    local after = string.format('(%.3f', now / 1000)
    if redis.call('ZCOUNT', tenant_unfinished, after, '+inf') >= tonumber(limits[3]) then
      local first = redis.call('ZRANGEBYSCORE', tenant_unfinished, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
      return { 'OVER-QUOTA', 'in-flight', limits[3], first[2] and tonumber(first[2]) * 1000 - now or 0, 0 }
    end
  end
  if limits[4] and quota.window.count >= tonumber(limits[4]) then
    return { 'OVER-QUOTA', 'new-keys', limits[4], quota.window.left, tonumber(limits[5]) }
  end
  return nil
end

-- Count one more key. The claim itself puts the key among the unfinished ones.
local function add_key(tenant_quota, quota)
  if #quota.ended > 0 then
    write_totals(tenant_quota, quota.totals)
    for _, field in ipairs(quota.ended) do
      redis.call('HDEL', tenant_quota, field)
    end
  end
  local open = quota.window
  if open then
    redis.call('HSET', tenant_quota, open.field, open.number .. ' ' .. decimal(open.count + 1))
  end
end

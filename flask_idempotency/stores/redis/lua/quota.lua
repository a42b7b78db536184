-- Whether a tenant may have one more key.

-- The number of the window of this length that is open, as text.
local function window_number(length)
  return decimal((now - now % length) / length)
end

-- Whether this field counts the new keys of a window that is open no more.
local function is_past_window(field, text)
  local length = string.match(field, '^' .. WINDOW .. '(%d*)$')
  if not length then
    return false
  end
  length = tonumber(length) or 0
  return length < 1 or string.match(text, '^%d+') ~= window_number(length)
end

-- The totals without the buckets that have ended, and the fields of those, and of windows that have. Writes nothing: a
-- refusal must not. Looked through when a bucket has ended, or when there is one more field to come for a window.
local function swept(totals, one_more)
  if not one_more and (totals.lowest == 0 or totals.lowest * 1000 > now) then
    return totals, {}
  end
  local left, ended = { records = totals.records, bytes = totals.bytes, lowest = 0 }, {}
  local fields = redis.call('HGETALL', KEYS[6])
  for i = 1, #fields, 2 do
    local edge = edge_of(fields[i])
    if edge and edge * 1000 <= now then
      local records, bytes = bucket_of(fields[i + 1])
      left.records, left.bytes = math.max(left.records - records, 0), math.max(left.bytes - bytes, 0)
      ended[#ended + 1] = fields[i]
    elseif edge and (left.lowest == 0 or edge < left.lowest) then
      left.lowest = edge
    elseif is_past_window(fields[i], fields[i + 1]) then
      ended[#ended + 1] = fields[i]
    end
  end
  return left, ended
end

-- The limits that hold: texts of digits, nil where there is none. nil when the tenant's own cannot be read.
local function limits(own, asked)
  if own then
    local records, bytes, in_flight, count, length = string.match(own, '^(%d*),(%d*),(%d*),(%d*),(%d*),')
    if not records or (count ~= '' and (tonumber(length) or 0) < 1) then
      return nil
    end
    own = { records, bytes, in_flight, count, length }
  end
  local held = {}
  for i = 1, 4 do
    local text = own and own[i] ~= '' and own[i] or asked[i]
    held[i] = text ~= '' and text or nil
  end
  -- A number of new keys and the time in which they may come are one limit.
  held[5] = own and own[4] ~= '' and own[5] or asked[5]
  return held
end

-- Each length has its own count: while two are in use, neither limit is to begin anew for the other.
local function window(length)
  local open, field = window_number(length), WINDOW .. decimal(length)
  local text = redis.call('HGET', KEYS[6], field)
  local number, count = string.match(text or '', '^(%d+) (%d+)$')
  return {
    field = field,
    number = open,
    seen = number == open and tonumber(count) or 0,
    left = length - now % length,
    is_new = not text,
  }
end

-- The books of a tenant, as far as a new key is concerned; nil when they cannot be read. Writes nothing.
local function books_of(asked)
  local found = redis.call('HMGET', KEYS[6], TOTALS, LIMITS)
  local totals, held = totals_of(found[1]), limits(found[2], asked)
  if not totals or not held then
    return nil
  end
  local books = { limits = held, unsettled = redis.call('ZCARD', KEYS[5]) }
  books.window = held[4] and window(tonumber(held[5]))
  books.totals, books.ended = swept(totals, books.window and books.window.is_new)
  return books
end

local function next_lease()
  local after = string.format('(%.3f', now / 1000)
  local first = redis.call('ZRANGEBYSCORE', KEYS[5], after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return redis.call('ZCOUNT', KEYS[5], after, '+inf'), first[2] and tonumber(first[2]) * 1000 - now or 0
end

-- The limit that is reached, what it allows, in how many microseconds there may be room, and the window's length.
local function refusal(books)
  local held, totals = books.limits, books.totals
  local ends = totals.lowest > 0 and totals.lowest * 1000 - now or 0
  if held[1] and books.unsettled + totals.records >= tonumber(held[1]) then
    return { 'OVER-QUOTA', 'records', held[1], ends, 0 }
  end
  if held[2] and totals.bytes >= tonumber(held[2]) then
    return { 'OVER-QUOTA', 'bytes', held[2], ends, 0 }
  end
  if held[3] then
    local running, left = next_lease()
    if running >= tonumber(held[3]) then
      return { 'OVER-QUOTA', 'in-flight', held[3], left, 0 }
    end
  end
  if held[4] and books.window.seen >= tonumber(held[4]) then
    return { 'OVER-QUOTA', 'new-keys', held[4], books.window.left, tonumber(held[5]) }
  end
  return nil
end

-- Writes what has become of the books with one more key. Its place among the unsettled is for the claim to take.
local function admit(books)
  if #books.ended > 0 then
    put_totals(KEYS[6], books.totals)
    for _, field in ipairs(books.ended) do
      redis.call('HDEL', KEYS[6], field)
    end
  end
  local open = books.window
  if open then
    redis.call('HSET', KEYS[6], open.field, open.number .. ' ' .. decimal(open.seen + 1))
  end
end


-- What becomes of an answer that nobody can read.

-- A completed record is quarantined because nobody can read its answer, which stays in it.
local function condemn(record, name)
  redis.call('ZCARD', KEYS[3])
  local books
  if record.counted then
    redis.call('ZCARD', KEYS[5])
    books = looked_up(record.deadline)
  end
  -- First, because it needs no memory; and from here on time does not end it.
  redis.call('PERSIST', KEYS[1])
  local first = first_byte(QUARANTINED, record.takeover, success(record), record.counted)
  local result = string.sub(record.bytes, 55, 61)
  redis.call('SET', KEYS[1], rewritten(record, first, record.deadline, result, '\7corrupt' .. tail(record)))
  redis.call('ZADD', KEYS[3], decimal(math.floor(now / 1000)), name)
  if books then
    leave(books, byte_size(record.bytes, record.head + 1))
    redis.call('ZADD', KEYS[5], '0', name)
  end
end


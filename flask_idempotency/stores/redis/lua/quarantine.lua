-- A record in flight becomes one of which nobody knows what came of it.

-- `reason` with its length before it.
local function quarantine(record, name, reason)
  -- An error of type must come before the first write.
  redis.call('ZCARD', KEYS[3])
  if record.counted then
    redis.call('ZCARD', KEYS[5])
  end
  redis.call('ZREM', KEYS[2], name)
  local first = first_byte(QUARANTINED, record.takeover, false, record.counted)
  redis.call('SET', KEYS[1], rewritten(record, first, record.deadline, NO_RESULT, reason))
  -- A resolver is asked at once: by the run that has ended the lease too, which goes by when it began.
  redis.call('ZADD', KEYS[3], decimal(math.min(math.floor(now / 1000), record.deadline)), name)
  if record.counted then
    redis.call('ZADD', KEYS[5], '0', name)
  end
  ring(record, name)
end


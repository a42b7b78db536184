-- Quarantines a record in flight.
-- @include lib/write
-- @include lib/notify

-- `reason` has its length before it.
local function quarantine(keys, record, name, reason, now)
  check_indexes(keys, record)
  redis.call('ZREM', keys[2], name)
  local first = first_byte(QUARANTINED, record.takeover, false, record.counted)
  redis.call('SET', keys[1], rewritten(record, first, record.deadline, NO_RESULT, reason))
  -- The resolver's turn comes at once, also in the janitor's run that ended the lease: that run goes by when it began.
  redis.call('ZADD', keys[3], decimal(math.min(math.floor(now / 1000), record.deadline)), name)
  if record.counted then
    redis.call('ZADD', keys[5], '0', name)
  end
  notify(record, name)
end

-- Extend the worker's lease to at least `lease` from now. Never shorten it.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys
-- ARGV: 1 now, 2 name, 3 token, 4 lease in microseconds
-- Returns: 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT'
-- Durable: no
-- Transitions: processing -> processing
-- @include lib/time
-- @include lib/owner
-- @include lib/write
-- @include lib/notify

local now, name, token, lease = time_now(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])

local record, refused = owned_record(KEYS, redis.call('GET', KEYS[1]), token, now)
if not record then
  return refused
end
-- Round up, so that no lease ends early.
local deadline = math.ceil((now + lease) / 1000)
if deadline <= record.deadline then
  return 'DONE'
end
if record.state == PROCESSING then
  if record.counted then
    redis.call('ZCARD', KEYS[5])
  end
  redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
  enter_in_flight(KEYS, record, name, deadline)
  local first = first_byte(PROCESSING, record.takeover, has_waiters(record), record.counted)
  redis.call('SET', KEYS[1], rewritten(record, first, deadline, NO_RESULT, ''))
elseif record.state == QUARANTINED and string.sub(record.bytes, record.head + 1) == LEASE_EXPIRED then
  -- It stays quarantined. But a resolver or an operator who wants to resolve it sees that its worker still runs.
  redis.call('PERSIST', KEYS[1])
  local first = first_byte(QUARANTINED, record.takeover, false, record.counted)
  redis.call('SET', KEYS[1], rewritten(record, first, deadline, NO_RESULT, LEASE_EXPIRED))
end
return 'DONE'

-- Put back a claim that Redis lost.
--
-- KEYS: 1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys,
--   8 cancelled, 9 freed
-- ARGV: 1 now, 2 name, 3 token, 4 fence, 5 attempt, 6 fingerprint, 7 tid and info, 8 lease in microseconds,
--   9 age of the request in microseconds, 10 the last loss before the claim was granted, in ms
-- Returns: 'DONE' | 'OTHER' | 'REMEMBERED'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/data_loss
-- @include lib/write

local now, name, token, fence, attempt, fingerprint, tid_and_info =
  time_now(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7]
local lease, age, lost_before = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])

local bytes = redis.call('GET', KEYS[1])
if bytes then
  local record = parse_record(bytes)
  -- No worker ever takes over a claim that was put back.
  return record and record.token == token and not record.takeover and 'DONE' or 'OTHER'
end
local memory = redis.call('HMGET', KEYS[4], FENCE, STORE_ID, PROCESS, REPLICATION_ID, LOST_AT)
local requested = math.floor((now - age) / 1000)
local process, replication_id, changed = handed_over(memory[3], memory[4])
if redis.call('EXISTS', KEYS[8]) == 1 or redis.call('EXISTS', KEYS[9]) == 1 then
  return 'OTHER'
end
-- Compare losses and not times: the clock may have been set since.
if memory[2] and not changed and (tonumber(memory[5]) or 0) == lost_before then
  return 'REMEMBERED'
end
local deadline = math.ceil((now + lease) / 1000)
redis.call('ZCARD', KEYS[2])
redis.call('PERSIST', KEYS[4]) -- Needs no memory: see leave_indexes in lib/write.
redis.call('ZADD', KEYS[2], decimal(deadline), name)
if memory[2] and changed then
  -- No claim has noted the loss in this partition yet.
  note_loss(KEYS[4], process, replication_id, { fence = memory[1], lost_at = memory[5], named = true }, now)
end
if fence > (tonumber(memory[1]) or 0) then
  redis.call('HSET', KEYS[4], FENCE, decimal(fence))
end
-- Not counted: Redis lost the quota in which the claim was counted, too.
redis.call(
  'SET',
  KEYS[1],
  first_byte(PROCESSING, false, false, false)
    .. token
    .. big_endian(fence, 7)
    .. string.char(attempt)
    .. fingerprint
    .. big_endian(requested, 6)
    .. big_endian(deadline, 6)
    .. NO_RESULT
    .. tid_and_info
)
return 'DONE'

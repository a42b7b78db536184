-- Remove the expired responses of some records that are remembered for longer, and their names from the index.
--
-- KEYS: 1 index of remembered records, then records...
-- ARGV: 1 now, 2 horizon in microseconds, then the name of each record...
-- Returns: how many names left the index
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/head
-- @include lib/remembered
-- @include lib/write

local now, horizon, left = time_now(ARGV[1]), tonumber(ARGV[2]), 0
-- A size of 0, and number 0 of a data key without an id: as a response that was erased with its tenant.
local SKELETON = '\0\1\0'

for i = 2, #KEYS do
  local key = KEYS[i]
  local bytes, record = read_head(key)
  local kept = record and record.state == COMPLETED and remembered_until(record)
  local due = kept and is_expired(record, math.min(now, horizon))
  if due or not kept then
    left = left + redis.call('ZREM', KEYS[1], ARGV[i + 1])
  end
  if due and string.sub(bytes, record.head + 1, record.head + 3) ~= SKELETON then
    local result = string.sub(bytes, 55, 61)
    redis.call('SET', key, rewritten(record, string.sub(bytes, 1, 1), record.deadline, result, SKELETON), 'KEEPTTL')
  end
end
return left

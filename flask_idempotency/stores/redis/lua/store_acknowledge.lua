-- Acknowledge a loss: from now on keys run that this partition does not know, whatever it had lost when it was looked at.
--
-- KEYS: 1 partition
-- ARGV: 1 now, 2 store id, 3 layout, 4 the last loss that the operator saw, in ms, '' for none
-- Returns: 'DONE' | 'OTHER' | 'CHANGED'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/data_loss

local now, id, layout, seen = time_now(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])

local memory = redis.call('HMGET', KEYS[1], STORE_ID, LAYOUT, PROCESS, REPLICATION_ID, LOST_AT, FENCE, ACKED_LOSS)
local named = not is_unclaimed(memory[1], id)
if named and (memory[1] ~= id or memory[2] ~= layout) then
  return 'OTHER'
end
local process, replication_id, changed = handed_over(memory[3], memory[4])
local lost_at, acked = tonumber(memory[5]), tonumber(memory[7])
if named and not changed and (not lost_at or (acked and acked >= lost_at)) then
  return 'DONE'
end
-- The operator did not see this loss, and did not wait for the workers that survived it.
if (named and changed) or (lost_at and not (seen and lost_at <= seen)) then
  return 'CHANGED'
end
redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
if not named then
  local remembered = { fence = memory[6], lost_at = memory[5], named = false }
  lost_at = note_loss(KEYS[1], process, replication_id, remembered, now)
end
redis.call('HSET', KEYS[1], STORE_ID, id, LAYOUT, layout, PROCESS, process, REPLICATION_ID, replication_id)
redis.call('HDEL', KEYS[1], EMPTIED)
if lost_at then
  redis.call('HSET', KEYS[1], ACKED_LOSS, string.format('%.0f', lost_at))
end
return 'DONE'

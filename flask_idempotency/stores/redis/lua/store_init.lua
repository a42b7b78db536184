-- Make a partition ready that never held a record.
--
-- KEYS: 1 partition
-- ARGV: 1 not used, 2 store id, 3 layout
-- Returns: 'DONE' | 'OTHER' | 'EMPTIED': a process noted that it held the id of a store before
-- Durable: no
-- Transitions: none
-- @include lib/data_loss

local id, layout = ARGV[2], ARGV[3]

local memory = redis.call('HMGET', KEYS[1], STORE_ID, LOST_AT, EMPTIED)
if not is_unclaimed(memory[1], id) then
  return memory[1] == id and 'DONE' or 'OTHER'
end
if memory[3] then
  return 'EMPTIED'
end
local process, replication_id = handed_over()
redis.call('HSET', KEYS[1], STORE_ID, id, LAYOUT, layout, PROCESS, process, REPLICATION_ID, replication_id)
if memory[2] then
  -- A claim noted before that the partition was empty.
  redis.call('HSET', KEYS[1], ACKED_LOSS, memory[2])
end
return 'DONE'

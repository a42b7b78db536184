-- Read what a partition knows of data loss, and note a loss that no claim has noted yet.
--
-- Another process than before is a loss, unless a client has judged that it restarted and lost no write: see data_loss.py.
--
-- KEYS: 1 partition
-- ARGV: 1 now, [2 the process that loses no write, '' for none, 3 verdict on a restart: 'whole', 'lost' or '',
--   4 the process before that restart, 5 '1' if the caller has seen this store with an id]
-- Returns: {now in microseconds, process, store id, layout, lost_at, acked_loss, 1 if this call noted the loss, fence,
--   the process before a restart that a client must judge, '1' if it was emptied}, '' for no value; losses in ms
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/data_loss

local now, lossless, verdict, before, known = time_now(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local memory =
  redis.call('HMGET', KEYS[1], STORE_ID, LAYOUT, PROCESS, REPLICATION_ID, LOST_AT, ACKED_LOSS, FENCE, LOSSLESS, EMPTIED)
local process, replication_id, changed = handed_over(memory[3], memory[4])
local noticed, doubted = 0, ''
if memory[1] and changed and memory[8] and memory[8] == memory[3] and verdict ~= 'lost' then
  if verdict == 'whole' and memory[3] == before and process == lossless then
    redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
    redis.call('HSET', KEYS[1], PROCESS, process, REPLICATION_ID, replication_id, LOSSLESS, process)
    memory[3], memory[8], changed = process, process, false
  else
    doubted = memory[3]
  end
end
if doubted == '' and ((memory[1] and changed) or (not memory[1] and not memory[5])) then
  redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
  local remembered = { fence = memory[7], lost_at = memory[5], named = memory[1] }
  local lost_at = note_loss(KEYS[1], process, replication_id, remembered, now)
  memory[5], noticed = string.format('%.0f', lost_at), 1
elseif doubted == '' and memory[1] and lossless ~= '' and process == lossless and memory[8] ~= process then
  redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
  redis.call('HSET', KEYS[1], LOSSLESS, process)
end
if known == '1' and is_unclaimed(memory[1], '') and not memory[9] then
  redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
  redis.call('HSET', KEYS[1], EMPTIED, '1')
  memory[9] = '1'
end
return {
  now, process, memory[1] or '', memory[2] or '', memory[5] or '', memory[6] or '', noticed, memory[7] or '', doubted,
  memory[9] or ''
}

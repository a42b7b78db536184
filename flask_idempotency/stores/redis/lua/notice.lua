-- How a partition's memory stands, and notices what it has lost.
--
-- Another process than before is a loss, unless a client has judged that it restarted and lost nothing: see lossless.py.
--
-- KEYS: 1 partition memory
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 the process that loses nothing it has answered, '' for
--   none; 3 the verdict on a restart: 'whole', 'lost', or '' while nobody has judged it; 4 the process before that restart
-- Returns {now in microseconds, process, id, layout, lost, open, 1 if this was noticed now, fence, the process before a restart
--   that has to be judged}, '' for what is not there

local lossless, verdict, before = ARGV[2], ARGV[3], ARGV[4]

local memory = redis.call('HMGET', KEYS[1], STORE_ID, LAYOUT, PROCESS, LINE, LOST, OPEN, FENCE, LOSSLESS)
local process, line, changed = handed_over(memory[3], memory[4])
local noticed, doubted = 0, ''
if memory[1] and changed and memory[8] and memory[8] == memory[3] and verdict ~= 'lost' then
  if verdict == 'whole' and memory[3] == before and process == lossless then
    redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
    redis.call('HSET', KEYS[1], PROCESS, process, LINE, line, LOSSLESS, process)
    memory[3], memory[8], changed = process, process, false
  else
    doubted = memory[3]
  end
end
if doubted == '' and ((memory[1] and changed) or (not memory[1] and not memory[5])) then
  redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
  local lost = note_loss(KEYS[1], process, line, { fence = memory[7], lost = memory[5], named = memory[1] })
  memory[5], noticed = string.format('%.0f', lost), 1
elseif doubted == '' and memory[1] and lossless ~= '' and process == lossless and memory[8] ~= process then
  redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
  redis.call('HSET', KEYS[1], LOSSLESS, process)
end
return {
  now, process, memory[1] or '', memory[2] or '', memory[5] or '', memory[6] or '', noticed, memory[7] or '', doubted
}

-- How a partition's memory stands, and notices what it has lost.
--
-- KEYS: 1 partition memory
-- Returns {now in microseconds, process, id, layout, lost, open, 1 if this was noticed now}, '' for what is not there

local memory = redis.call('HMGET', KEYS[1], STORE_ID, LAYOUT, PROCESS, LINE, LOST, OPEN, FENCE)
local process, line, changed = handed_over(memory[3], memory[4])
local noticed = 0
if (memory[1] and changed) or (not memory[1] and not memory[5]) then
  redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
  local lost = note_loss(KEYS[1], process, line, { fence = memory[7], lost = memory[5], named = memory[1] })
  memory[5], noticed = string.format('%.0f', lost), 1
end
return { now, process, memory[1] or '', memory[2] or '', memory[5] or '', memory[6] or '', noticed }

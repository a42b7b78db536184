-- How a partition's memory stands, and notices what it has lost.
--
-- KEYS: 1 partition memory
-- Returns {now in microseconds, process, id, layout, lost, open, 1 if this was noticed now}, '' for what is not there

local memory = redis.call('HMGET', KEYS[1], STORE_ID, LAYOUT, PROCESS, LINE, LOST, OPEN)
local process, line, changed = handed_over(memory[3], memory[4])
local noticed = 0
if (memory[1] and changed) or (not memory[1] and not memory[5]) then
  noticed = 1
  memory[5] = string.format('%.0f', note_loss(KEYS[1], process, line, memory[5]))
end
return { now, process, memory[1] or '', memory[2] or '', memory[5] or '', memory[6] or '', noticed }

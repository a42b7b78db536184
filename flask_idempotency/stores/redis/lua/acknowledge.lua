-- From now on keys run that this partition does not know, whatever it had lost when somebody looked.
--
-- KEYS: 1 partition memory
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 the store's id, 3 its layout; 4 the latest loss that was
--   seen, in ms, '' for none
-- Returns 'DONE' | 'OTHER' | 'CHANGED'

local id, laid_out, seen = ARGV[2], ARGV[3], tonumber(ARGV[4])

local memory = redis.call('HMGET', KEYS[1], STORE_ID, LAYOUT, PROCESS, LINE, LOST, FENCE, OPEN)
local named = not is_nobodys(memory[1], id)
if named and (memory[1] ~= id or memory[2] ~= laid_out) then
  return 'OTHER'
end
local process, line, changed = handed_over(memory[3], memory[4])
local lost, open = tonumber(memory[5]), tonumber(memory[7])
if named and not changed and (not lost or (open and open >= lost)) then
  return 'DONE'
end
-- Nobody has looked at this one, nor waited for the owners that survived it.
if (named and changed) or (lost and not (seen and lost <= seen)) then
  return 'CHANGED'
end
redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
if not named then
  lost = note_loss(KEYS[1], process, line, { fence = memory[6], lost = memory[5], named = false })
end
redis.call('HSET', KEYS[1], STORE_ID, id, LAYOUT, laid_out, PROCESS, process, LINE, line)
if lost then
  redis.call('HSET', KEYS[1], OPEN, string.format('%.0f', lost))
end
return 'DONE'

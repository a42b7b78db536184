-- Makes the memory of a partition ready in which nothing was ever kept.
--
-- KEYS: 1 partition memory
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 the store's id, 3 its layout
-- Returns 'DONE' | 'OTHER'

local id, laid_out = ARGV[2], ARGV[3]

local memory = redis.call('HMGET', KEYS[1], STORE_ID, LOST)
if not is_nobodys(memory[1], id) then
  return memory[1] == id and 'DONE' or 'OTHER'
end
local process, line = handed_over()
redis.call('HSET', KEYS[1], STORE_ID, id, LAYOUT, laid_out, PROCESS, process, LINE, line)
if memory[2] then
  -- That it was empty was noticed before.
  redis.call('HSET', KEYS[1], OPEN, memory[2])
end
return 'DONE'

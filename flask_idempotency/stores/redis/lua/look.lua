-- When a client last saw that this Redis loses nothing it has answered, and notes what it sees now.
--
-- KEYS: 1 memory of partition 0
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 the process that loses nothing, '' if this one may lose
--   something, '?' if it does not tell
-- Returns {now in microseconds, `milliseconds process` of the look before or ''}

local lossless = ARGV[2]

local memory = redis.call('HMGET', KEYS[1], STORE_ID, PROCESS, LINE, LOOKED)
local process, _, changed = handed_over(memory[2], memory[3])
if memory[1] and not changed and lossless ~= '?' then
  if lossless ~= '' and process == lossless then
    redis.call('PERSIST', KEYS[1]) -- Even when it is full: see owner.lua.
    redis.call('HSET', KEYS[1], LOOKED, string.format('%.0f ', math.floor(now / 1000)) .. process)
  elseif memory[4] then
    redis.call('HDEL', KEYS[1], LOOKED)
  end
end
return { now, memory[4] or '' }

-- Note that this Redis loses no write that it has answered, as a client sees now. Return when a client last saw that.
--
-- KEYS: 1 partition 0
-- ARGV: 1 now, 2 the process that loses no write, '' if this one may lose some, '?' if it does not tell
-- Returns: {now in microseconds, 'milliseconds process' of the look before or ''}
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/process
-- @layout STORE_ID PROCESS REPLICATION_ID LAST_LOOK

local now, lossless = time_now(ARGV[1]), ARGV[2]

local memory = redis.call('HMGET', KEYS[1], STORE_ID, PROCESS, REPLICATION_ID, LAST_LOOK)
local process, _, changed = handed_over(memory[2], memory[3])
if memory[1] and not changed and lossless ~= '?' then
  if lossless ~= '' and process == lossless then
    redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
    redis.call('HSET', KEYS[1], LAST_LOOK, string.format('%.0f ', math.floor(now / 1000)) .. process)
  elseif memory[4] then
    redis.call('HDEL', KEYS[1], LAST_LOOK)
  end
end
return { now, memory[4] or '' }

-- From now on keys run that this partition does not know, whatever it has lost so far.
--
-- KEYS: 1 partition memory
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 the store's id, 3 its layout
-- Returns 'DONE' | 'OTHER' | 'CHANGED'

local id, laid_out = ARGV[2], ARGV[3]

local memory = redis.call('HMGET', KEYS[1], STORE_ID, LAYOUT, PROCESS, LINE, LOST)
if memory[1] and (memory[1] ~= id or memory[2] ~= laid_out) then
  return 'OTHER'
end
local process, line, changed = handed_over(memory[3], memory[4])
local lost = tonumber(memory[5])
if not memory[1] then
  lost = lost or math.floor(now / 1000)
  -- What is left of claims was made before this; what is granted from now on was not.
  local last_fence = math.max(tonumber(redis.call('HGET', KEYS[1], FENCE) or '0') or 0, now)
  redis.call('HSET', KEYS[1], FENCE, string.format('%.0f', last_fence), BEFORE, string.format('%.0f', last_fence))
elseif changed then
  -- Nobody has waited for the owners that survived this one.
  return 'CHANGED'
end
redis.call('HSET', KEYS[1], STORE_ID, id, LAYOUT, laid_out, PROCESS, process, LINE, line)
if lost then
  redis.call('HSET', KEYS[1], LOST, string.format('%.0f', lost), OPEN, string.format('%.0f', lost))
end
return 'DONE'

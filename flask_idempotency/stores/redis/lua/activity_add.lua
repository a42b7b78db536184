-- Add counts to a minute and to an hour, once for each token.
--
-- Each bucket is a hash: an endpoint, as a JSON string, and its counters, as a JSON object of whole numbers.
--
-- KEYS: 1 token of this call, 2 minute, 3 hour
-- ARGV: 1 not used, 2 for how many ms to remember the token, 3 for how many ms to keep the minute, 4 and the hour,
--   then endpoint, counters...
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none
-- @include lib/number

if redis.call('EXISTS', KEYS[1]) == 1 then
  return 'DONE'
end
-- Read everything first: a wrong type must fail before the first write.
local writes = {}
for k = 2, 3 do
  for i = 5, #ARGV, 2 do
    local total = {}
    for _, counters in ipairs({ redis.call('HGET', KEYS[k], ARGV[i]) or '', ARGV[i + 1] }) do
      for name, count in string.gmatch(counters, '"([^"]+)":(%d+)') do
        total[name] = (total[name] or 0) + tonumber(count)
      end
    end
    local text = ''
    for name, count in pairs(total) do
      text = text .. ',"' .. name .. '":' .. decimal(count)
    end
    writes[#writes + 1] = { KEYS[k], ARGV[i], '{' .. string.sub(text, 2) .. '}' }
  end
end
redis.call('SET', KEYS[1], '', 'PX', ARGV[2])
for _, write in ipairs(writes) do
  redis.call('HSET', write[1], write[2], write[3])
end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return 'DONE'

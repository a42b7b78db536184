-- Drops those of some cached answers that are one tenant's.
--
-- KEYS: entries
-- ARGV: 1 not looked at; 2 tid
-- Returns 'DONE'

local tid = ARGV[2]

for _, key in ipairs(KEYS) do
  if redis.pcall('GETRANGE', key, 75, 90) == tid then
    -- Whoever waits for this Redis need not wait until a long answer's memory is given back.
    redis.call('UNLINK', key)
  end
end
return 'DONE'

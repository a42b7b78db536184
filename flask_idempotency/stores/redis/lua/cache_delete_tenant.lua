-- Delete those of some cache entries that belong to one tenant.
--
-- KEYS: cache entries...
-- ARGV: 1 not used, 2 tid
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none

local tid = ARGV[2]

for _, key in ipairs(KEYS) do
  if redis.pcall('GETRANGE', key, 75, 90) == tid then
    -- UNLINK frees the memory of a long response later, so that other clients do not wait for it.
    redis.call('UNLINK', key)
  end
end
return 'DONE'

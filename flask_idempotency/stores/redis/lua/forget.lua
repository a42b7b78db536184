-- Drops what is kept in the place of an answer, but not what withdraw.lua has put there: answers are on their way still that
-- it keeps out. And what should say when the tenant was erased, where that is none of ours.
--
-- KEYS: 1 entry, 2 when its tenant was erased
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 how long an entry is that withdraw.lua puts there
-- Returns 'DONE'

local withdrawn = tonumber(ARGV[2])

-- An error, and so no number, for what is of another type.
if redis.pcall('STRLEN', KEYS[1]) ~= withdrawn then
  redis.call('DEL', KEYS[1])
end
if type(redis.pcall('STRLEN', KEYS[2])) ~= 'number' then
  redis.call('DEL', KEYS[2])
end
return 'DONE'

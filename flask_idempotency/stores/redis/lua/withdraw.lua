-- Puts an entry in the place of an answer that has nothing to replay, and the fence of which that answer is too old for.
--
-- KEYS: 1 entry
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 what to put there; 3 for how many milliseconds
-- Returns 'DONE'

local withdrawn, remembered = ARGV[2], ARGV[3]

-- This one may have been on its way for long. One of a higher fence says more.
if redis.pcall('STRLEN', KEYS[1]) == #withdrawn then
  if number(redis.call('GET', KEYS[1]), 32, 38) > number(withdrawn, 32, 38) then
    return 'DONE'
  end
end
redis.call('SET', KEYS[1], withdrawn, 'PX', remembered)
return 'DONE'

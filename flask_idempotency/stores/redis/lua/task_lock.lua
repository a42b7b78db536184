-- Lock a task for one janitor for a while.
--
-- KEYS: 1 lock of the task
-- ARGV: 1 now, 2 token, 3 lease in microseconds, 4 the longest lease that any janitor takes, in microseconds
-- Returns: 'TAKEN' | 'HELD'
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/number

local now, token, lease, longest = time_now(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local ends, holder = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (.*)$')
-- A lock that ends even later was taken before the clock was set back.
if ends and holder ~= token and tonumber(ends) > now and tonumber(ends) <= now + longest then
  return 'HELD'
end
redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
redis.call('SET', KEYS[1], decimal(now + lease) .. ' ' .. token, 'PX', decimal(math.ceil(lease / 1000)))
return 'TAKEN'

-- Give quarantined records to the resolver, and set when the next turn of each is.
--
-- KEYS: 1 in_flight, 2 quarantine, then records of the partition...
-- ARGV: 1 now, 2 when a turn must have come, 3 shortest pause and 4 longest pause, all in ms, 5 what the tokens begin with,
--   '' for every record, then the names of the records...
-- Returns: {now in microseconds, then of each record its bytes, '' if it has no turn, 'OTHER' for another token}
-- Durable: no
-- Transitions: none
-- @include lib/time
-- @include lib/number
-- @include lib/index

local now, until_ms, shortest, longest, token_start =
  time_now(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]

local given = { now }
for i = 3, #KEYS do
  local name, bytes = ARGV[i + 3], ''
  local turn = redis.call('ZSCORE', KEYS[2], name)
  if turn and tonumber(turn) <= until_ms then
    local head, record = indexed_record(KEYS[1], KEYS[2], QUARANTINED, name, KEYS[i], now)
    if head and string.sub(record.token, 1, #token_start) ~= token_start then
      bytes = 'OTHER'
    elseif head then
      bytes = redis.call('GET', KEYS[i])
      local pause = math.min(math.max(math.floor(now / 1000) - record.deadline, shortest), longest)
      -- The name is in the index, so ZADD needs no memory. Redis does not know that: see leave_indexes in lib/write.
      redis.call('PERSIST', KEYS[2])
      redis.call('ZADD', KEYS[2], decimal(until_ms + pause), name)
    elseif redis.call('ZSCORE', KEYS[2], name) then
      -- A record that cannot be read gets its next turn, too. Else it would be the first in the queue for ever.
      redis.call('PERSIST', KEYS[2])
      redis.call('ZADD', KEYS[2], decimal(until_ms + longest), name)
    end
  end
  given[i - 1] = bytes
end
return given

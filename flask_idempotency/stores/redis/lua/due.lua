-- Gives out the turns of quarantined records, and says when the next ones are.
--
-- KEYS: as in indexed.lua
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 by when a turn must have come, 3 the shortest pause and
--   4 the longest, all in ms; 5 what the tokens begin with that are meant, '' for all; then the names of the records
-- Returns {now, and of each of the records its bytes, '' if there is no turn to give, 'OTHER' if another one is not meant}

local latest, least, most, owner = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]

local given = { now }
for i = 3, #KEYS do
  local name, bytes = ARGV[i + 3], ''
  local turn = redis.call('ZSCORE', KEYS[2], name)
  if turn and tonumber(turn) <= latest then
    local beginning, record = indexed(QUARANTINED, name, KEYS[i])
    local now_ms = math.floor(now / 1000)
    if beginning and string.sub(record.token, 1, #owner) ~= owner then
      bytes = 'OTHER'
    elseif beginning then
      bytes = redis.call('GET', KEYS[i])
      local pause = math.min(math.max(now_ms - record.deadline, least), most)
      -- A name that is there needs no memory, but Redis does not know that: see owner.lua.
      redis.call('PERSIST', KEYS[2])
      redis.call('ZADD', KEYS[2], decimal(latest + pause), name)
    elseif redis.call('ZSCORE', KEYS[2], name) then
      -- What cannot be read has turns as well: else it would be the first in the queue for ever.
      redis.call('PERSIST', KEYS[2])
      redis.call('ZADD', KEYS[2], decimal(latest + most), name)
    end
  end
  given[i - 1] = bytes
end
return given

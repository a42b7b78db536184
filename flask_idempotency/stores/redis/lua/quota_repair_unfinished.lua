-- Correct a tenant's set of unfinished records: it names each record that is counted and not completed, and no other.
--
-- KEYS: 1 tenant_unfinished, then records of its partition...
-- ARGV: 1 not used, 2 tid, then the names of the records...
-- Returns: {names taken out, names put in}
-- Durable: no
-- Transitions: none
-- @include lib/number
-- @include lib/head

local tid = ARGV[2]

local taken, put = 0, 0
for i = 2, #KEYS do
  local name = ARGV[i + 1]
  local bytes, record = read_head(KEYS[i])
  local counted = record and record.counted and record.state ~= COMPLETED and string.sub(bytes, 62, 77) == tid
  local score = redis.call('ZSCORE', KEYS[1], name)
  -- A record that cannot be read was counted, and stays so until an operator releases it.
  if score and not counted and (record or redis.call('EXISTS', KEYS[i]) == 0) then
    redis.call('ZREM', KEYS[1], name)
    taken = taken + 1
  elseif counted then
    local right = record.state == PROCESSING and record.deadline or 0
    if tonumber(score or '-1') ~= right then
      redis.call('ZADD', KEYS[1], decimal(right), name)
    end
    put = put + (score and 0 or 1)
  end
end
return { taken, put }

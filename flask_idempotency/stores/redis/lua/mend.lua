-- Has a tenant's records among the unsettled exactly if they are counted and not completed.
--
-- KEYS: 1 its counted records that are unsettled, then records of its partition
-- ARGV: 1 now in microseconds, or '' for the server's own time; 2 tid; then the names of these records
-- Returns {taken out, put in}

local tid = ARGV[2]

local taken, put = 0, 0

for i = 2, #KEYS do
  local name = ARGV[i + 1]
  local bytes = glance(KEYS[i])
  local record = bytes and parsed(bytes)
  local counted = record and record.counted and record.state ~= COMPLETED and string.sub(bytes, 62, 77) == tid
  local score = redis.call('ZSCORE', KEYS[1], name)
  -- One that is there and cannot be read has been counted: it stays so until somebody has settled it.
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

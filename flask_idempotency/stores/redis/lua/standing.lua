-- What a partition has of records that are not completed. Writes nothing.
--
-- KEYS: 1 in-flight index, 2 quarantine index
-- ARGV: 1 now in microseconds, or '' for the server's own time
-- Returns {in flight and lapsed, lapsed, microseconds since the first of those leases ended, quarantined}

local lapsed, lapsed_for = redis.call('ZCOUNT', KEYS[1], '-inf', string.format('%.0f', math.floor(now / 1000))), 0
if lapsed > 0 then
  local first = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  lapsed_for = math.max(now - tonumber(first[2]) * 1000, 0)
end
return { redis.call('ZCARD', KEYS[1]), lapsed, lapsed_for, redis.call('ZCARD', KEYS[2]) }

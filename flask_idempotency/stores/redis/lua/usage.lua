-- What a tenant has, and what it may have. Writes nothing.
--
-- KEYS: 1 its counted records that are unsettled, 2 its ledger
-- ARGV: 1 now in microseconds, or '' for the server's own time
-- Returns {now, unsettled, in flight, {ledger's fields and values}}

return {
  now,
  redis.call('ZCARD', KEYS[1]),
  redis.call('ZCOUNT', KEYS[1], string.format('(%.3f', now / 1000), '+inf'),
  redis.call('HGETALL', KEYS[2]),
}

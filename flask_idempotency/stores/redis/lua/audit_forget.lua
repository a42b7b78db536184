-- Remove the audit trails of some records of a tenant.
--
-- KEYS: 1 names of the tenant's records that have a trail, then trails...
-- ARGV: 1 not used, then the names of the records...
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none

for i = 2, #KEYS do
  redis.call('UNLINK', KEYS[i])
  redis.call('ZREM', KEYS[1], ARGV[i])
end
return 'DONE'

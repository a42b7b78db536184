-- Write, whatever the script before wrote: a replica that has this write has that script's effect, too.
--
-- KEYS: 1 the key to write, 2 partition: it makes a Cluster move both together, see layout.py
-- ARGV: 1 not used
-- Returns: 'DONE'
-- Durable: no
-- Transitions: none

redis.call('PERSIST', KEYS[1]) -- Needs no memory: see leave_indexes in lib/write.
redis.call('SET', KEYS[1], '', 'PX', 60000)
return 'DONE'

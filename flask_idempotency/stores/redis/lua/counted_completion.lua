-- Ends a completion: what complete.lua says, for a record that is counted.

local books, size = looked_up(deadline), byte_size(payload, 1)
leave_indexes(record, name)
enter(books, size)
redis.call('SET', KEYS[1], bytes, 'PX', ttl)
ring(record, name)
return 'DONE'

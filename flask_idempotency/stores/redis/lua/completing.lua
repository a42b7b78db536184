-- Goes on where complete.lua or settle.lua has found a record that may be completed. Ends in counted_completion.lua for one
-- that is counted.

local LONGEST_DURATION = 2 ^ 40 - 1

local no_key = key_refused(record, key_number)
if no_key then
  return no_key
end
-- Up, so that nothing ends before its time. What ends in one bucket ends with it, and is not counted down one by one.
local unit = record.counted and width or 1
-- From the claim where the clock was set back since: a life that ends before it began is taken for damage.
local deadline = math.ceil((math.max(now, requested(record) * 1000) + keep) / (unit * 1000)) * unit
-- A clock that was set back would make it negative.
local duration = math.min(math.max(math.floor(now / 1000) - requested(record), 0), LONGEST_DURATION)
local first = first_byte(COMPLETED, record.takeover, succeeded, record.counted)
local bytes = rewritten(record, first, deadline, digits(duration, 5) .. digits(status, 2), payload)
local ttl = decimal(math.ceil(deadline - now / 1000) + AFTERLIFE)
if not record.counted then
  leave_indexes(record, name)
  redis.call('SET', KEYS[1], bytes, 'PX', ttl)
  ring(record, name)
  return 'DONE'
end


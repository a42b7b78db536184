-- A record with its response.
-- @include lib/write

local LONGEST_DURATION = 2 ^ 40 - 1

-- Return the completed record, its deadline in ms and its time to live in ms. `unit` is what the deadline is a multiple of,
-- in ms: all responses that a quota counts in one bucket end together, so that none is counted down alone.
local function completed(record, unit, keep, succeeded, status, payload, now)
  local requested = requested_at(record)
  -- Round up, so that no response ends early. Count from the request if the clock was set back since: a life that ends
  -- before it began counts as damage.
  local deadline = math.ceil((math.max(now, requested * 1000) + keep) / (unit * 1000)) * unit
  -- A clock that was set back would make it negative.
  local duration = math.min(math.max(math.floor(now / 1000) - requested, 0), LONGEST_DURATION)
  local first = first_byte(COMPLETED, record.takeover, succeeded, record.counted)
  local bytes = rewritten(record, first, deadline, big_endian(duration, 5) .. big_endian(status, 2), payload)
  return bytes, deadline, decimal(math.ceil(deadline - now / 1000) + AFTERLIFE)
end

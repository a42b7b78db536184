-- A record written to one string.

-- From here on Lua's numbers skip some: two claims would get the same fence.
local HIGHEST_FENCE = 2 ^ 53 - 1
-- In ms. Redis drops an answer this long after its own deadline: what counts is the deadline, and scripts see both clocks.
local AFTERLIFE = 60000
-- A reason with its length before it: the owner's lease ended, and it was silent.
local LAPSED = '\13lease-expired'
local NO_RESULT = string.rep('\0', 7)

-- tostring would round a number this long: 1.7951869300405e+15.
local function decimal(n)
  return string.format('%.0f', n)
end

local function digits(n, width)
  local out = {}
  for i = width, 1, -1 do
    local digit = n % 256
    out[i] = digit
    n = (n - digit) / 256
  end
  return string.char(unpack(out))
end

local function first_byte(state, takeover, succeeded, counted)
  return string.char(
    FORMAT * 32 + state * 8 + (takeover and 4 or 0) + (succeeded and 2 or 0) + (counted and 1 or 0)
  )
end

-- The same record with other state, deadline (in ms), result (duration and status, 7 bytes) and tail.
local function rewritten(record, first, deadline, result, rest)
  local bytes = record.bytes
  return first
    .. string.sub(bytes, 2, 48)
    .. digits(deadline, 6)
    .. result
    .. string.sub(bytes, 62, record.head)
    .. rest
end


-- A completed record's answer, as far as it is compared and counted.

-- More is counted as this much: sums of it stay whole.
local LARGEST_COUNTED = 2 ^ 40

local function success(record)
  return math.floor(string.byte(record.bytes, 1) / 2) % 2 == 1
end

local function tail(record)
  return string.sub(record.bytes, record.head + 1)
end

-- Whether this is the answer that the record holds, every byte of it and every fact that stands in clear.
local function is_answer(record, payload, succeeded, status)
  return tail(record) == payload and success(record) == succeeded and number(record.bytes, 60, 61) == status
end

-- What an answer counts as whose size stands at this place; nothing where that cannot be read.
local function byte_size(bytes, at)
  return math.min(length_at(bytes, at) or 0, LARGEST_COUNTED)
end


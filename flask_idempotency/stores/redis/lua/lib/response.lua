-- The response in a completed record: compared and counted, never opened.
-- @include lib/length
-- @include lib/record

-- A larger size counts as this one, so that sums of sizes stay exact.
local LARGEST_COUNTED = 2 ^ 40

local function is_success(record)
  return math.floor(string.byte(record.bytes, 1) / 2) % 2 == 1
end

local function response_of(record)
  return string.sub(record.bytes, record.head + 1)
end

-- Compare every byte of the response, and each fact that stands outside of it.
local function is_response(record, payload, succeeded, status)
  return response_of(record) == payload
    and is_success(record) == succeeded
    and read_number(record.bytes, 60, 61) == status
end

-- Return how many bytes the quota counts for the response that begins here: 0 if its size cannot be read.
local function counted_size(bytes, at)
  return math.min(length_at(bytes, at) or 0, LARGEST_COUNTED)
end

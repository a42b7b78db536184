-- Compares the tenant and the principal of a record with those that a claim accepts.
-- @include lib/record

-- Return true if the record shows the caller, nil if it shows no caller, and false if it is another's.
local function is_callers(record, argv)
  if not argv[18] then
    return true
  end
  local shown = 18 + tonumber(argv[18])
  for at = 19, #argv do
    local pair = argv[at]
    -- The texts begin after their own length. Each has its length before it, so no pair is the beginning of another.
    if HEADER + 3 + #pair <= record.head and string.sub(record.bytes, HEADER + 4, HEADER + 3 + #pair) == pair then
      if at <= shown then
        return true
      end
      return nil
    end
  end
  return false
end

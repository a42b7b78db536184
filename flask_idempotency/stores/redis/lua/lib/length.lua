-- Lengths as encoding.py writes them: seven bits in each byte, the lowest first.

-- Return the length at this place, and where the bytes after it begin. Return nil if there is none.
local function length_at(bytes, at)
  local n, unit = 0, 1
  for last = at, at + 8 do
    local byte = string.byte(bytes, last)
    if not byte then
      return nil
    end
    n = n + byte % 128 * unit
    if byte < 128 then
      return n, last + 1
    end
    unit = unit * 128
  end
  return nil
end

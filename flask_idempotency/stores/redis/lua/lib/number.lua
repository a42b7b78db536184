-- Numbers as text and as bytes.

-- Return a whole number as decimal text. tostring would round one this long: 1.7951869300405e+15.
local function decimal(n)
  return string.format('%.0f', n)
end

-- Return a whole number as big-endian bytes.
local function big_endian(n, width)
  local out = {}
  for i = width, 1, -1 do
    local digit = n % 256
    out[i] = digit
    n = (n - digit) / 256
  end
  return string.char(unpack(out))
end

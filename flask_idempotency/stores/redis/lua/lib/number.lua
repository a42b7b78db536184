-- Numbers as text and as bytes.

-- Return a whole number as decimal text. tostring would round one this long: 1.7951869300405e+15.
local function decimal(n)
  return string.format('%.0f', n)
end

-- Return a whole number below 2 ^ 53 as this many big-endian bytes, at most seven.
local function big_endian(n, width)
  local g = n % 256
  n = (n - g) / 256
  local f = n % 256
  n = (n - f) / 256
  local e = n % 256
  n = (n - e) / 256
  local d = n % 256
  n = (n - d) / 256
  local c = n % 256
  n = (n - c) / 256
  local b = n % 256
  -- Without a loop and a table: each claim and each completion runs these lines.
  return string.sub(string.char((n - b) / 256, b, c, d, e, f, g), -width)
end

-- Whether this Redis still knows what it has promised. Stands before grant.lua: keys that are known do without.
--
-- ARGV: 8 the store's id, '' for any; 9 its layout; 10 what becomes of keys that it may have forgotten: 'run', 'refuse', or
--   for how many ms they are refused; 11 how far clients' clocks may be off, in ms; 12 when the client made its key, in ms,
--   '' where nothing says so

local expected, laid_out, after, skew, born = ARGV[8], ARGV[9], ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12])

local memory = redis.call('HMGET', KEYS[4], FENCE, STORE_ID, LAYOUT, PROCESS, LINE, LOST, OPEN, BEFORE, LOSSLESS)
local process, line, changed = handed_over(memory[4], memory[5])
local last_before = tonumber(memory[8]) or 0
local now_ms, since, open, loss, noticed = math.floor(now / 1000), tonumber(memory[6]), tonumber(memory[7]), nil, 0
local its_name = after == 'run' and expected == '' and UNNAMED or expected
local remembered = { fence = memory[1], lost = memory[6], named = not is_nobodys(memory[2], its_name) }
local is_written = false
if not remembered.named then
  loss = 'missing'
  if after == 'run' then
    loss = nil
    redis.call(
      'HSET', KEYS[4],
      STORE_ID, expected ~= '' and expected or UNNAMED, LAYOUT, laid_out, PROCESS, process, LINE, line
    )
  elseif not since then
    since, last_before, is_written = note_loss(KEYS[4], process, line, remembered)
    noticed = is_written and 1 or 0
  end
elseif (expected ~= '' and memory[2] ~= expected) or memory[3] ~= laid_out then
  loss = 'foreign'
elseif changed and after ~= 'run' and memory[9] and memory[9] == memory[4] then
  -- This may be a restart that lost nothing. A client looks at it, and notice.lua then accepts it or notes a loss.
  return { 'DOUBT' }
elseif changed then
  since, last_before, is_written = note_loss(KEYS[4], process, line, remembered)
  noticed = is_written and 1 or 0
elseif memory[5] ~= line then
  redis.pcall('HSET', KEYS[4], LINE, line)
end
if not loss and since and after ~= 'run' then
  local held = tonumber(after)
  local acknowledged = open and open >= since
  -- Made after the loss, it was not used before, unless at a primary that was cut off and went on. What claims to be from
  -- the future says nothing.
  local later = born and born > since + skew and born <= now_ms + skew
  if not (acknowledged or later or (held and now_ms >= since + held)) then
    loss = 'changed'
  end
end


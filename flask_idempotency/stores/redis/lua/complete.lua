-- Stores what came of the work, once. Goes on in completing.lua.
--
-- ARGV: 3 token, 4 keep in microseconds, 5 '1' for success, 6 status, 7 byte size, seal and payload, 8 number of the data
--   key that it is sealed with, '0' for none, 9 width of a bucket in ms
-- Returns 'DONE' | 'ABSENT' | 'LOST' | 'DOUBT' | 'CORRUPT' | 'ERASED' | 'KEYLESS'

local name, token, keep, succeeded, status, payload, key_number, width =
  ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1', tonumber(ARGV[6]), ARGV[7], ARGV[8], tonumber(ARGV[9])

local record, refused = owned(token)
if not record then
  return refused
end
if record.state == COMPLETED then
  return 'DONE'
end


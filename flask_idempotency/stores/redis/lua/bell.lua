-- Those who wait for a key in other processes are told when it is settled, if its claim has said that some may.

-- While a record is in flight, the bit that tells success of an answer tells this.
local function awaited(record)
  return record.state == PROCESSING and math.floor(string.byte(record.bytes, 1) / 2) % 2 == 1
end

-- To be called after the last write: who may not publish has settled it all the same.
local function ring(record, name)
  if awaited(record) then
    redis.pcall('PUBLISH', BELL, name)
  end
end


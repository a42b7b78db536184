-- The time by which a script decides.

-- Return the time in microseconds. `given` is '' in production, and then the server's clock counts.
local function time_now(given)
  local now = tonumber(given)
  if now then
    return now
  end
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

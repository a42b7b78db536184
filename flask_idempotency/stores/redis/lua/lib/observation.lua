-- Reads and writes what is remembered of a key in observe mode.
-- @include lib/number

-- A request that runs and found no other, or took over; and what the next request finds when it has ended.
local NEW, TAKEN_OVER, REPLAY, UNKNOWN = 'N', 'T', 'R', 'U'

-- Return the observation in this text, false if there is none or it has expired, and nil if this release did not write it.
-- All times are in microseconds. `began`: when the first request began. `watched`: when the watched one began.
local function parse_observation(text, now)
  if not text then
    return false
  end
  local state, began, watched, lease_ends, ends, rest = string.match(text, '^([NTRU]) (%d+) (%d+) (%d+) (%d+) (.*)$')
  if not state or #rest < 16 then
    return nil
  end
  if tonumber(ends) <= now then
    return false
  end
  return {
    state = state,
    began = tonumber(began),
    watched = tonumber(watched),
    lease_ends = tonumber(lease_ends),
    ends = tonumber(ends),
    token = string.sub(rest, 1, 16),
    fingerprint = string.sub(rest, 17),
  }
end

-- Whether its request runs.
local function is_watched(seen)
  return seen.state == NEW or seen.state == TAKEN_OVER
end

-- Write the observation. Redis forgets it when it expires.
local function write_observation(key, seen, now)
  local times = decimal(seen.began) .. ' ' .. decimal(seen.watched) .. ' ' .. decimal(seen.lease_ends)
  local text = seen.state .. ' ' .. times .. ' ' .. decimal(seen.ends) .. ' ' .. seen.token .. seen.fingerprint
  redis.call('SET', key, text, 'PX', decimal(math.ceil((seen.ends - now) / 1000)))
end

-- Whether the same process keeps this Redis' memory as did before: after a restart, a fail-over, or from an older copy it is
-- another one.

-- Its line of replication is new after each of these, and cheaper to ask for than the process. '' where scripts are not told.
local replication = redis.pcall('INFO', 'replication')
replication = type(replication) == 'string' and replication or ''
local line = string.match(replication, 'master_replid:(%x+)') or ''

-- The process; and whether it is not the one, or not on the line, that is remembered.
local function handed_over(process_then, line_then)
  if line ~= '' and line == line_then then
    return process_then, false
  end
  local server = redis.pcall('INFO', 'server')
  local process = type(server) == 'string' and string.match(server, 'run_id:(%x+)') or ''
  -- A line that begins with a first replica, or ends an hour after the last one, continues none. That of a process which was
  -- demoted, and promoted again, does: it has taken over what others had, and lost what they had not heard of.
  local promoted = string.find(replication, 'master_replid2:0*[1-9a-f]') ~= nil
  return process, process ~= process_then or promoted
end

-- The time of a loss that is noticed now, in ms: later than any other, also where the clock was set back.
local function noticed_at(before)
  return math.max(math.floor(now / 1000), (tonumber(before) or 0) + 1)
end


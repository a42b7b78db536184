-- Whether the same process keeps this Redis' memory as did before: after a restart, a fail-over, or from an older copy it is
-- another one.

-- The process and its line of replication, '' where scripts are not told; and whether they do not go on with those that are
-- remembered.
local function handed_over(process_then, line_then)
  -- The line is new after each of these, and cheaper to ask for.
  local replication = redis.pcall('INFO', 'replication')
  replication = type(replication) == 'string' and replication or ''
  local line = string.match(replication, 'master_replid:(%x+)') or ''
  if line ~= '' and line == line_then then
    return process_then, line, false
  end
  local server = redis.pcall('INFO', 'server')
  local process = type(server) == 'string' and string.match(server, 'run_id:(%x+)') or ''
  -- A line that begins with a first replica, or ends an hour after the last one, continues none. That of a process which was
  -- demoted, and promoted again, does: it has taken over what others had, and lost what they had not heard of.
  local promoted = string.find(replication, 'master_replid2:0*[1-9a-f]') ~= nil
  return process, line, process ~= process_then or promoted
end

-- Writes down that the memory is another one's from now on. Returns when that was noticed, in ms: later than any other time,
-- also where the clock was set back.
local function note_loss(key, process, line, before)
  local last_fence = redis.call('HGET', key, FENCE) or '0'
  local lost = math.max(math.floor(now / 1000), (tonumber(before) or 0) + 1)
  redis.call('HSET', key, PROCESS, process, LINE, line, LOST, string.format('%.0f', lost), BEFORE, last_fence)
  return lost
end


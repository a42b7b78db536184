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

-- Writes down that memory was lost. Returns when that was, in ms: later than any other time and than every claim, also where
-- the clock was set back; the last fence that may have been given out before; and whether it is written down. A Redis that
-- is full may refuse that: then it is a loss all the same, and noticed again.
local function note_loss(key, process, line, remembered)
  local last_fence = tonumber(remembered.fence) or 0
  local lost = math.max(math.floor(now / 1000), (tonumber(remembered.lost) or 0) + 1, math.floor(last_fence / 1000))
  if not remembered.named then
    -- What gave the fences out is gone. What is left of claims is older than this, and none that comes will be.
    last_fence = math.max(last_fence, now)
  end
  local told = redis.pcall(
    'HSET', key,
    PROCESS, process, LINE, line,
    LOST, string.format('%.0f', lost), BEFORE, string.format('%.0f', last_fence)
  )
  if type(told) == 'table' then
    return lost, last_fence, false
  end
  if not remembered.named then
    redis.call('HSET', key, FENCE, string.format('%.0f', last_fence))
  end
  return lost, last_fence, true
end

-- Whether a part that has this name is nobody's. 'unnamed' is what those who run whatever is unknown call a part that they
-- find empty, and to others that is no name.
local UNNAMED = 'unnamed'

local function is_nobodys(name, expected)
  return not name or (name == UNNAMED and expected ~= UNNAMED)
end


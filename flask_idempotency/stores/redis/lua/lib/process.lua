-- Which server process holds the data. After a restart, a fail-over or a restored copy it is another process than before.
-- @layout PROCESS REPLICATION_ID STORE_ID LOST_AT FENCE FENCE_AT_LOSS

-- A worker that runs unknown keys gives this name to a partition that it finds empty. To other workers it is no name.
local UNNAMED = 'unnamed'

-- Return the server's process and replication id, '' where scripts may not read INFO; and whether the data may have changed
-- hands since the process and the replication id that the partition remembers.
local function handed_over(process_then, replication_id_then)
  -- The replication id is new after each restart and fail-over, and it costs less to read than the process.
  local replication = redis.pcall('INFO', 'replication')
  replication = type(replication) == 'string' and replication or ''
  local replication_id = string.match(replication, 'master_replid:(%x+)') or ''
  if replication_id ~= '' and replication_id == replication_id_then then
    return process_then, replication_id, false
  end
  local server = redis.pcall('INFO', 'server')
  local process = type(server) == 'string' and string.match(server, 'run_id:(%x+)') or ''
  -- A first replica begins a new replication id, and so does the loss of the last replica for an hour: neither continues
  -- another id. A process that was demoted and promoted again continues one. It took over what the others had, and lost
  -- the writes that they had not received.
  local promoted = string.find(replication, 'master_replid2:0*[1-9a-f]') ~= nil
  return process, replication_id, process ~= process_then or promoted
end

-- Note that the partition lost data. Return when, in ms; the last fence that it may have granted before; and whether the
-- note is written.
--
-- The time is later than each loss and each claim before it, even if the clock was set back. A full Redis may refuse the
-- note. The loss counts all the same, and the next claim notes it.
local function note_loss(partition, process, replication_id, remembered, now)
  local last_fence = tonumber(remembered.fence) or 0
  local lost_at = math.max(math.floor(now / 1000), (tonumber(remembered.lost_at) or 0) + 1, math.floor(last_fence / 1000))
  if not remembered.named then
    -- The counter of fences is gone. Each claim that is left has a lower fence than this, and each later claim a higher.
    last_fence = math.max(last_fence, now)
  end
  local written = redis.pcall(
    'HSET', partition,
    PROCESS, process, REPLICATION_ID, replication_id,
    LOST_AT, string.format('%.0f', lost_at), FENCE_AT_LOSS, string.format('%.0f', last_fence)
  )
  if type(written) == 'table' then
    return lost_at, last_fence, false
  end
  if not remembered.named then
    redis.call('HSET', partition, FENCE, string.format('%.0f', last_fence))
  end
  return lost_at, last_fence, true
end

-- Return whether a partition with this store id belongs to no store, as a worker that expects `expected` sees it.
local function is_unclaimed(store_id, expected)
  return not store_id or (store_id == UNNAMED and expected ~= UNNAMED)
end

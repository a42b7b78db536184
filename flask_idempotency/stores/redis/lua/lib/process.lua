-- Which server process holds the data. After a restart, a fail-over or a restored copy it is another process than before.

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

-- Decides whether this Redis still has the records that it was given, and notes it if not.
-- @include lib/process
-- @layout STORE_ID LAYOUT PROCESS REPLICATION_ID FENCE LOST_AT ACKED_LOSS FENCE_AT_LOSS LOSSLESS EMPTIED

-- A worker that runs unknown keys gives this name to a partition that it finds empty. To other workers it is no name.
local UNNAMED = 'unnamed'

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

-- Return whether a claim of an unknown key may run: kind, noticed, lost_at, fence_at_loss and fence:
--   kind is nil if the key may run, or 'missing', 'foreign' or 'changed', or 'doubt': a client must judge a restart first,
--   noticed is 1 if this call noted the loss, else 0,
--   lost_at is when the last loss was noted, in ms, nil if never,
--   fence_at_loss is the last fence that may have been granted before it,
--   fence is the last fence of the partition as it was read, false if there is none.
--
-- `rule` is what becomes of unknown keys after a loss: 'run', 'refuse', or for how many ms they are refused.
-- `skew` is how far clients' clocks may be off, and `made_at` when the client made its key, nil if unknown; both in ms.
local function data_loss_of(partition, expected, layout, rule, skew, made_at, now)
  local memory = redis.call(
    'HMGET', partition,
    FENCE, STORE_ID, LAYOUT, PROCESS, REPLICATION_ID, LOST_AT, ACKED_LOSS, FENCE_AT_LOSS, LOSSLESS
  )
  local process, replication_id, changed = handed_over(memory[4], memory[5])
  local fence_at_loss = tonumber(memory[8]) or 0
  local lost_at, acked, kind, noticed = tonumber(memory[6]), tonumber(memory[7]), nil, 0
  local named_as = rule == 'run' and expected == '' and UNNAMED or expected
  local remembered = { fence = memory[1], lost_at = memory[6], named = not is_unclaimed(memory[2], named_as) }
  local is_written
  if not remembered.named then
    kind = 'missing'
    if rule == 'run' then
      kind = nil
      redis.call(
        'HSET', partition,
        STORE_ID, expected ~= '' and expected or UNNAMED, LAYOUT, layout,
        PROCESS, process, REPLICATION_ID, replication_id
      )
    elseif not lost_at then
      lost_at, fence_at_loss, is_written = note_loss(partition, process, replication_id, remembered, now)
      noticed = is_written and 1 or 0
    end
  elseif (expected ~= '' and memory[2] ~= expected) or memory[3] ~= layout then
    kind = 'foreign'
  elseif changed and rule ~= 'run' and memory[9] and memory[9] == memory[4] then
    -- This may be a restart that lost no write. A client judges it, and store_status then accepts it or notes a loss.
    return 'doubt'
  elseif changed then
    lost_at, fence_at_loss, is_written = note_loss(partition, process, replication_id, remembered, now)
    noticed = is_written and 1 or 0
  elseif memory[5] ~= replication_id then
    redis.pcall('HSET', partition, REPLICATION_ID, replication_id)
  end
  if not kind and lost_at and rule ~= 'run' then
    local now_ms, held = math.floor(now / 1000), tonumber(rule)
    local acknowledged = acked and acked >= lost_at
    -- A key that the client made after the loss cannot have run before, unless a cut-off primary served it. Do not
    -- trust a time in the future.
    local later = made_at and made_at > lost_at + skew and made_at <= now_ms + skew
    if not (acknowledged or later or (held and now_ms >= lost_at + held)) then
      kind = 'changed'
    end
  end
  return kind, noticed, lost_at, fence_at_loss, memory[1]
end

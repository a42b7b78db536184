-- Decides whether this Redis still has the records that it was given. Only a claim of an unknown key needs to know.
-- @include lib/process
-- @layout LAYOUT ACKED_LOSS LOSSLESS

-- Return kind, noticed, lost_at, fence_at_loss and fence:
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
    -- This may be a restart that lost nothing. A client judges it, and store_status then accepts it or notes a loss.
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
    -- A key that the client made after the loss cannot have run before, unless a cut-off primary served it. A time in the
    -- future proves nothing.
    local later = made_at and made_at > lost_at + skew and made_at <= now_ms + skew
    if not (acknowledged or later or (held and now_ms >= lost_at + held)) then
      kind = 'changed'
    end
  end
  return kind, noticed, lost_at, fence_at_loss, memory[1]
end

-- Decide as claim.lua does whether a key that the partition does not know may run, and write nothing.
--
-- KEYS: 1 partition
-- ARGV: 1 now, 2 store_id, 3 layout, 4 rule, 5 skew_ms, 6 key_made_at_ms
-- Returns: {'missing', 'foreign', 'changed', 'doubt' or '' if the key may run, the last fence before the last loss}
-- Durable: no
-- Transitions: none

-- Return this function for commands that only read. Any other command does nothing, as if it had succeeded.
local function only_reads(call)
  return function(...)
    local command = ...
    if command == 'HMGET' or command == 'INFO' or command == 'TIME' then
      return call(...)
    end
    return 0
  end
end

-- The libraries below note what they find. A claim must do that, because it decides what runs; this script must not.
local redis = { call = only_reads(redis.call), pcall = only_reads(redis.pcall) }
-- @include lib/time
-- @include lib/data_loss

local kind, _, _, fence_at_loss =
  data_loss_of(KEYS[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), time_now(ARGV[1]))
return { kind or '', string.format('%.0f', fence_at_loss or 0) }

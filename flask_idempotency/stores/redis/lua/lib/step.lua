-- Changes the entries of a journal.
-- @include lib/journal
-- @include lib/data_keys

-- Arguments of one entry: id, µs that its function ran, size, number of its data key, and the bytes that Python wrote.
local FACTS = 5
-- Bytes before the step's own facts.
local ENTRY = 41

local function is_finished(entry)
  return string.byte(entry, 1) >= 128
end

-- Return whether the part of an entry that scripts read is intact.
local function is_entry(entry)
  return #entry >= ENTRY and sum_of(string.sub(entry, 1, 35)) == string.sub(entry, 36, 37)
end

-- Return the entries that these ids have now, or nil and the word for the caller, who may then change nothing. Ids to be
-- withdrawn are args[first] to args[last - 1]; the facts of entries follow from args[last]. Read-only.
local function known_entries(key, tenant_keys, record, args, first, last)
  local known, checked, i = {}, {}, first
  while i <= #args do
    local id, key_number = args[i], i >= last and args[i + 3] or '0'
    if not checked[key_number] then
      local refused = data_key_refusal(tenant_keys, record, key_number)
      if refused then
        return nil, refused
      end
      checked[key_number] = true
    end
    local entry = redis.call('HGET', key, id)
    if entry and not is_entry(entry) then
      return nil, 'CORRUPT'
    end
    known[id] = entry
    i = i + (i >= last and FACTS or 1)
  end
  return known
end

local function withdraw_step(key, journal, id, entry)
  redis.call('HDEL', key, id)
  journal.entries = journal.entries - 1
  journal.size = math.max(journal.size - read_number(entry, 31, 35), 0)
end

-- Enter a step, and return its entry. `entry` is what its id has so far, if anything: the caller checks that it is not
-- finished.
local function enter_step(key, journal, id, entry, fence, took, size, bytes, now)
  local began, finished = big_endian(math.max(now - took, 0), 7), '\0\0\0\0\0\0\0'
  if is_finished(bytes) then
    began = entry and string.sub(entry, 11, 17) or began
    finished = big_endian(now, 7)
  end
  local place = entry and string.sub(entry, 9, 10) or big_endian(journal.places, 2)
  local head = string.sub(bytes, 1, 1) .. fence .. place .. began .. finished .. big_endian(took, 6) .. big_endian(size, 5)
  local entered = head .. sum_of(head) .. string.sub(bytes, 2)
  redis.call('HSET', key, id, entered)
  if not entry then
    journal.entries = journal.entries + 1
    journal.places = math.min(journal.places + 1, 65535)
  end
  journal.size = journal.size + size - (entry and read_number(entry, 31, 35) or 0)
  return entered
end

-- Withdraw and enter the steps of these arguments, as `known_entries` takes them, and save the journal. Never change a
-- finished step. `owner` is the fence of the worker that writes, or nil in its place: an entry then keeps its own fence,
-- because its result is sealed for that.
local function change_steps(keys, record, journal, known, args, from, first, owner, now)
  local size = journal.size
  for i = from, first - 1 do
    local id = args[i]
    local entry = known[id]
    if entry and not is_finished(entry) and (not owner or string.sub(entry, 2, 8) == owner) then
      withdraw_step(keys[8], journal, id, entry)
      known[id] = nil
    end
  end
  for i = first, #args, FACTS do
    local id, took, entry_size, entry_bytes = args[i], tonumber(args[i + 1]), tonumber(args[i + 2]), args[i + 4]
    local entry = known[id]
    if not entry or not is_finished(entry) then
      local fence = owner or entry and string.sub(entry, 2, 8) or journal.fence
      known[id] = enter_step(keys[8], journal, id, entry, fence, took, entry_size, entry_bytes, now)
    end
  end
  save_journal(keys[8], record, journal)
  if record.counted then
    count_journal(keys[6], journal.size - size)
  end
end

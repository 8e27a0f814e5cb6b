-- Name the KEYS and ARGV of acquire_slot.lua, look at all slots at once, and take a free one that nobody waits for, before
-- Lua makes the functions for all other cases. Put after take_unwanted.lua and lib.lua.
local counts = ARGV[7] ~= '' and table.remove(KEYS)
local held, counter, queue = KEYS[2], KEYS[3], KEYS[4]
local id, expire_ms, name, record, channel, join, ticket, limit = unpack(ARGV)
expire_ms, limit = tonumber(expire_ms), tonumber(limit)
local now = now_us()
local slots, receipts = {KEYS[1], unpack(KEYS, 5, limit + 3)}, KEYS[limit + 5]
local undone = KEYS[limit + 4]
local values = redis.call('MGET', unpack(slots))

local mine, free  -- the slot that the id holds, or else one that is reserved for it; the first free one
for i = 1, limit do
  local value = values[i]
  if not value then
    free = free or i
  elseif is_of(value, id) and (not mine or fence_of(value) ~= '0') then
    mine = i
  end
end
if free and not mine and ticket == '' and not receipts then
  local lock, number = slots[free], tostring(free)
  local found = redis.call('EXISTS', lock, lock, queue, queue, undone, undone, held)
  local fence = take_unwanted(found, lock, held, counter, id, name .. number, record, now, expire_ms)
  if fence then
    return {ok = fence .. ' ' .. number}
  end
end

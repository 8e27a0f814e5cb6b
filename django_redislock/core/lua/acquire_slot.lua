-- Acquire one of the slots of a semaphore; when none is free for the caller, join their one queue or leave it.
-- KEYS  1 slot 1, 2 index of held locks, 3 fence counter, 4 queue of all slots, then slots 2 to limit; note that this
--       attempt is given up (undone.lua); receipts, if the id may have released a slot before; with a ticket,
--       the last one: counts of the bucket
-- ARGV  1 to 7 as for acquire.lua (3: the name without a slot's number), 8 limit
-- Returns a status when acquired, because it is read faster than a string: the fence, negative when the id held the slot
-- before, and the slot's number; otherwise what acquire.lua does. The KEYS and ARGV are named in quick_slot.lua.
for i = 1, limit do
  local wrong = not_ours(slots[i], values[i] or redis.call('GET', slots[i]))  -- MGET shows no key of another type
  if wrong then
    return wrong
  end
end

local undo = given_up(undone)
if undo then
  return undo
end
local joins = join ~= '0'
local slot = mine and fence_of(values[mine]) ~= '0' and mine
local holds = slot and values[slot]
if not slot then
  if join == '2' and not mine then
    tell_if_lost(slots[limit], queue, id, channel)
  end
  local drawn = ticket ~= '' and ticket or whole(now)
  local left
  slot, left = find_slot(slots, limit, values, mine, queue, id, channel, drawn, joins, now)
  if not slot then
    return wait_in_queue(counts, queue, id, name, channel, joins, ticket, drawn, left, now)
  end
end

local fence, before = take(slots[slot], held, counter, holds, id, name .. slot, record, now, expire_ms)
if ticket ~= '' then
  count_waits(counts, now, name, waited_ms(ticket, now), 1, 0)
end
if receipts then
  redis.call('ZREM', receipts, 'id ' .. id)
end
if channel ~= '' then  -- it may have come back there, though a slot was reserved for it
  redis.call('ZREM', queue, channel .. '\n' .. id)
end
leave_others(slots, limit, slot, queue, id, channel, now)
return {ok = (before and '-' or '') .. fence .. ' ' .. slot}

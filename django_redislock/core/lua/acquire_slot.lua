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
  local order, left = {mine}, -1
  for i = 1, limit do  -- after the one that is reserved for the caller
    if i ~= mine then
      order[#order + 1] = i
    end
  end
  for _, i in ipairs(order) do
    local free, ms = may_take(slots[i], queue, values[i], id, channel, drawn, joins, now)
    if free then
      slot = i
      break
    end
    left = ms >= 0 and (left < 0 or ms < left) and ms or left
  end
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
-- Slots that nobody released, as those of a killed process, go to the next waiters. Before, each poll brought one waiter
-- to a slot: twenty slots took nine seconds.
local waits = redis.call('EXISTS', queue) == 1
for i, value in ipairs(redis.call('MGET', unpack(slots))) do
  if i ~= slot and value and is_of(value, id) then
    hand_over(slots[i], queue, '')
  elseif i ~= slot and waits and (not value or fence_of(value) == '0') then
    may_take(slots[i], queue, value, '\n', channel, '', false, now)  -- that nobody takes
  end
end
return {ok = (before and '-' or '') .. fence .. ' ' .. slot}

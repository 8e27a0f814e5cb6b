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
  local order, left, first = {mine}, -1, false
  for i = 1, limit do  -- after the one that is reserved for the caller
    if i ~= mine then
      order[#order + 1] = i
    end
  end
  for _, i in ipairs(order) do
    local free, ms, answered = may_take(slots[i], queue, values[i], id, channel, drawn, joins, now)
    if free then
      slot = i
      break
    end
    left, first = ms >= 0 and (left < 0 or ms < left) and ms or left, first or answered
  end
  if not slot then
    return wait_in_queue(counts, queue, id, name, channel, joins, ticket, drawn, left, first, now)
  end
end

local fence, before = take(slots[slot], held, counter, holds, id, name .. slot, record, now, expire_ms)
if ticket ~= '' then
  count_waits(counts, now, name, waited_ms(ticket, now), 1, 0)
end
if receipts then
  redis.call('ZREM', receipts, 'id ' .. id)
end
-- The caller may have answered the roll calls of several slots, and then it still has its place in the queue: the next
-- ones have their turn there.
if channel ~= '' then
  redis.call('ZREM', queue, channel .. '\n' .. id)
end
-- A slot that nobody released, as those of a killed process, goes to the next waiter, who does the same. Before, each
-- poll brought one waiter to a slot: twenty slots took nine seconds.
local waits = redis.call('EXISTS', queue) == 1
for i, value in ipairs(redis.call('MGET', unpack(slots))) do
  local next_id, ends, next_channel, answered = string.match(value or '', '^([^\n]*)\n0\n(%d+)\n([^\n]*)\n?(.*)$')
  local overdue = answered == '' and select(2, until_end(ends, now))
  if i ~= slot and next_id == id then
    hand_over(slots[i], queue, '')
  elseif i ~= slot and waits and (not value or overdue) then
    if overdue and next_channel ~= '' and next_channel ~= channel then
      call_roll(queue, '', next_channel)  -- so that no further waiter of a process that is frozen comes next
    end
    hand_over(slots[i], queue, '')
    waits = false
  end
end
return {ok = (before and '-' or '') .. fence .. ' ' .. slot}

-- Start an execution: take its lock, or one of the slots of a semaphore, as acquire.lua and acquire_slot.lua do, and
-- end the lock under which its message waited. Or find that a copy of the message runs or was processed; or wait, while
-- the message keeps its place.
-- KEYS  1 lock, or slot 1; 2 index of held locks, 3 fence counter, 4 queue, 5 processed marker of the message; if it
--       holds another lock while it waits, that lock, its queue, and the newest arguments for all copies of the
--       message; slots 2 and up to the limit, or to the highest limit, because a copy may have one above a lowered
--       limit; note that this attempt is given up (undone.lua); with a ticket, counts of the bucket
-- ARGV  1 to 7 as for acquire.lua, 8 limit (0: no semaphore), 9 id under which the message waits, 10 '1' when its
--       copies can be told from other messages, 11 what the ids of its executions begin with, 12 its version, 13 name
--       of the lock under which it waits ('': none, or the same as the execution's), 14 expiry of the newest arguments
--       (ms), 15 '1' to note also that a message began with its own ones
-- Returns the fence, or a status: fence, slot (0: none), '1' when the message had its place, and the newest arguments
-- (base64; '': its own), when acquired. 0 when the message was processed or published again, -1 - (ms until another
-- try) when a copy of it runs or ends now, else what acquire.lua returns. The KEYS and ARGV are named in
-- quick_start.lua.
local last = math.max(limit, 1)
values = values or {redis.call('GET', slots[1])}
for i = 1, last do
  local wrong = not_ours(slots[i], values[i] or redis.call('GET', slots[i]))  -- MGET shows no key of another type
  if wrong then
    return wrong
  end
end
local undo = given_up(undone)
if undo then
  return undo
end

local entry = channel .. '\n' .. id
local mine, slot  -- the slot that is reserved for the id, and the one that it holds
for i, value in pairs(values) do
  if value and is_of(value, id) then
    if fence_of(value) == '0' then
      mine = i
    else
      slot = i
    end
  end
end
local before = slot and values[slot]

if known == '1' and not slot then
  local reply = reply_for_copy(slots, values, marker, copies, version, id)
  if reply then
    redis.call('ZREM', queue, entry)
    for i, value in pairs(values) do
      if value and is_of(value, id) then
        hand_over(slots[i], queue, id)
      end
    end
    return reply
  end
end

if not slot and limit == 0 and values[1] and is_of(values[1], waiting_id) and fence_of(values[1]) ~= '0' then
  slot = 1  -- the lock of its message
end
if not slot then
  if join == '2' and not mine then
    tell_if_lost(slots[last], queue, id, channel)
  end
  local drawn = ticket ~= '' and ticket or whole(now)
  local left
  slot, left = find_slot(slots, last, values, mine, queue, id, channel, drawn, join ~= '0', now)
  if not slot then
    return wait_in_queue(counts, queue, id, name, channel, join ~= '0', ticket, drawn, left, now)
  end
end

-- The place in the queue is removed as well, because a waiter may find that its own message holds the lock.
redis.call('ZREM', queue, entry)
if ticket ~= '' then
  count_waits(counts, now, name, waited_ms(ticket, now), 1, 0)
end
local own = limit > 0 and name .. slot or name
local fence = take(slots[slot], held, counter, before, id, own, record, now, expire_ms)
if limit > 1 then
  leave_others(slots, limit, slot, queue, id, channel, now)
end
return begin(fence, limit > 0 and slot or 0, hand_over)

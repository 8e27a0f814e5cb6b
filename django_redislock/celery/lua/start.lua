-- Start an execution: acquire the lock as acquire.lua does, take it over from the execution's own message, or find that
-- the message was processed before.
-- KEYS  1 lock, 2 index of held locks, 3 fence counter, 4 queue, 5 processed marker of the message, 6 note that this
--       attempt is given up (undone.lua), 7 receipts, if the id was given; with a ticket, the last one: counts of the
--       bucket
-- ARGV  1 id, 2 expire (ms), 3 name, 4 record, 5 channel of the waiter, 6 '1' or '2' to join the queue, as for
--       acquire.lua, 7 ticket ('': draw one), 8 id under which the message holds the lock while it waits, 9 '1' when its copies can be told from other
--       messages, 10 what the ids of the message's executions begin with, 11 its version
-- Returns the fence when acquired, 0 when the message was processed or published again, -1 - (ms until another try)
-- when a copy of it runs or ends now, else what acquire.lua returns.
local value = redis.call('GET', lock)
local wrong = not_ours(lock, value) or given_up(undone)
if wrong then
  return wrong
end
local entry = channel .. '\n' .. id
local is_own = value and is_of(value, id) and fence_of(value) ~= '0'

if known == '1' and not is_own then
  local reply = reply_for_copy({lock}, marker, copies, tonumber(version), id)
  if reply then
    redis.call('ZREM', queue, entry)
    if value and is_of(value, id) then
      hand_over(lock, queue, id)
    end
    return reply
  end
end

if value and is_of(value, waiting_id) and fence_of(value) ~= '0' then
  -- A message that waits in its worker takes its lock anew, and keeps the arguments of its duplicates.
  local newest = id == waiting_id and string.match(value, ',"newest":"[^"]*"}$')
  record = newest and string.sub(record, 1, -2) .. newest or record
  value = false
elseif not is_own then
  if join == '2' and not (value and is_of(value, id)) then
    tell_if_lost(lock, queue, id, channel)
  end
  local reply = wait_for_turn(lock, counts, queue, value, id, name, channel, join ~= '0', ticket, now)
  if reply then
    return reply
  end
  value = false
end

-- The place in the queue is removed as well, because a waiter may find that its own message holds the lock.
redis.call('ZREM', queue, entry)
if ticket ~= '' then
  count_waits(counts, now, name, waited_ms(ticket, now), 1, 0)
end
if receipts then
  redis.call('ZREM', receipts, 'id ' .. id)
end
return tonumber((take(lock, held, counter, value, id, name, record, now, expire_ms)))

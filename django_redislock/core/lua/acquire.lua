-- Acquire the lock; when another acquisition holds it, join its queue or leave it.
-- KEYS  1 lock, 2 index of held locks, 3 fence counter, 4 queue, 5 note that this attempt is given up (undone.lua),
--       6 receipts, if the id may have released the lock before; with a ticket, the last one: counts of the bucket
-- ARGV  1 id, 2 expire (ms), 3 name, 4 record, 5 channel of the waiter, 6 '1' to join the queue, '2' when it has joined
--       and was not called, 7 ticket ('': none)
-- Returns the fence when acquired, negative when the id held the lock before; otherwise {ms until another try makes
-- sense (negative: unknown), ticket, length of the queue}. The KEYS and ARGV are named in quick.lua.

local value = redis.call('GET', lock)
local wrong = not_ours(lock, value) or given_up(undone)
if wrong then
  return wrong
end

-- Who waits to be a leader waits as long as another one leads: that is no contention.
local counted = not string.find(record, '"kind":"leader"', 1, true) and counts
if not (value and is_of(value, id) and fence_of(value) ~= '0') then
  if join == '2' and not (value and is_of(value, id)) then
    tell_if_lost(lock, queue, id, channel)
  end
  local reply = wait_for_turn(lock, counted, queue, value, id, name, channel, join ~= '0', ticket, now)
  if reply then
    return reply
  end
  value = false
end

local fence, before = take(lock, held, counter, value, id, name, record, now, expire_ms)
if ticket ~= '' then
  count_waits(counted, now, name, waited_ms(ticket, now), 1, 0)
end
if receipts then
  redis.call('ZREM', receipts, 'id ' .. id)
  if channel ~= '' then  -- the id had its turn in the place of another caller, or holds the lock already
    redis.call('ZREM', queue, channel .. '\n' .. id)
  end
end
return before and -tonumber(fence) or tonumber(fence)

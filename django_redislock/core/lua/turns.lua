-- Whose turn it is at a lock that the caller does not hold; put in front of scripts that queue, after counts.lua.
--
-- A reservation that was not claimed shows a process that does not answer, and the queue may have more entries of such
-- processes. So there is a roll call: the first waiter of each process is woken to try for the lock, and of those that
-- do so within ROLL_CALL_MS the first in the queue has its turn. The waiters ahead of it leave the queue; they are
-- woken, and come back to their places when they can. Meanwhile the value of the lock key is a reservation for the
-- first waiter that answered, with its ticket:  id \n 0 \n end (ms) \n channel \n ticket ; before the first answer, id
-- and channel are empty and the ticket is '-'.

local ROLL_CALL_MS = 200
local ROLL_CALL = 500  -- entries of the queue at most

-- Return an error when the attempt to which a call belongs was given up before the call arrived, else nil.
local function given_up(undone)
  if redis.call('EXISTS', undone) == 1 then
    return redis.error_reply('ERR The attempt was given up before this call arrived.')
  end
end

-- Wake the first waiter of each process ahead of the caller, and return whether there is none. The entries of
-- processes that are gone leave the queue, and those of the `silent` one: its woken waiters come back when they can.
local function call_roll(queue, own, silent)
  local alive, leave, first = {}, {}, true
  for _, entry in ipairs(redis.call('ZRANGE', queue, 0, ROLL_CALL - 1)) do
    if entry == own then
      break
    end
    local channel, id = string.match(entry, '^(.-)\n(.*)$')
    if alive[channel] == nil or channel == silent then
      alive[channel] = redis.pcall('PUBLISH', channel, id) ~= 0 and channel ~= silent
    end
    first = first and not alive[channel]
    if not alive[channel] then
      leave[#leave + 1] = entry
    end
  end
  if #leave > 0 then
    redis.call('ZREM', queue, unpack(leave))
  end
  return first
end

-- Remove so many entries from the queue, and wake their waiters.
local function dismiss(queue, number)
  local gone = redis.call('ZPOPMIN', queue, math.min(number, ROLL_CALL))
  for i = 1, #gone, 2 do
    local channel, id = string.match(gone[i], '^(.-)\n(.*)$')
    redis.pcall('PUBLISH', channel, id)
  end
end

-- Remove an entry that has its turn from the queue, and the entries ahead of it.
local function call_up(queue, entry)
  local ahead = redis.call('ZRANK', queue, entry) or 0
  if ahead > 0 then
    dismiss(queue, ahead)
  end
  redis.call('ZREM', queue, entry)
end

-- Return whether the caller may take the lock. If not, also return how many ms are left until another try makes sense
-- (negative: unknown), and whether the caller is to try then in any case, as the first that answered a roll call.
-- `value` is the lock key's, if it is not the caller's acquisition; `joins`: the caller joins the queue.
local function may_take(lock, queue, value, id, channel, ticket, joins, now)
  if not value then
    value = redis.call('EXISTS', queue) == 1 and hand_over(lock, queue, id)
    return not value or is_of(value, id), RESERVED_MS
  end
  local next_id, ends, next_channel, answered = string.match(value, '^([^\n]*)\n0\n(%d+)\n([^\n]*)\n?(.*)$')
  if not next_id then
    return false, redis.call('PTTL', lock)
  end
  local left, overdue = until_end(ends, now)
  local rolling, own = answered ~= '', channel .. '\n' .. id
  if next_id == id and (overdue or not rolling or not joins) then
    if rolling then
      call_up(queue, own)
    end
    return true
  end
  if not (overdue or rolling) then
    return false, left
  end
  if joins then
    redis.call('ZADD', queue, 'NX', ticket, own)
  end

  if overdue and rolling then  -- and the caller is not the first that answered
    if next_id ~= '' then
      call_up(queue, next_channel .. '\n' .. next_id)
      if redis.pcall('PUBLISH', next_channel, next_id) ~= 0 then
        reserve(lock, next_id, next_channel)
        return false, RESERVED_MS
      end
    elseif joins then  -- the caller is the first that answers
      call_up(queue, own)
      return true
    else
      dismiss(queue, ROLL_CALL)
    end
  end
  if overdue then
    local first = call_roll(queue, own, next_channel ~= channel and next_channel)
    if redis.call('EXISTS', queue) == 0 then
      return true
    end
    if first and joins then
      call_up(queue, own)
      return true
    end
    next_id, answered, left = '', '-', ROLL_CALL_MS
    ends = whole(math.floor(now / 1000) + left)
  end
  local answers = joins and (next_id == '' or tonumber(ticket) < tonumber(answered))
  if answers then
    if redis.call('ZRANK', queue, own) == 0 then
      redis.call('ZREM', queue, own)
      return true
    end
    next_id, next_channel, answered = id, channel, ticket
  elseif overdue then
    next_channel = ''
  end
  if answers or overdue then
    value = next_id .. '\n0\n' .. ends .. '\n' .. next_channel .. '\n' .. answered
    redis.call('SET', lock, value, 'PX', left + REMEMBERED_MS)
  end
  return false, left, next_id == id
end

-- Tell the caller's process that the caller is not in the queue in which it believes to be: the queue was lost by a
-- FLUSHDB, an eviction, or a step of the clock. All of the process's waiters for the lock come back then. Without this,
-- each poll brought one of them back: forty waiters of one process took twenty seconds.
local function tell_if_lost(lock, queue, id, channel)
  if not redis.call('ZSCORE', queue, channel .. '\n' .. id) then
    redis.pcall('PUBLISH', channel, '\n' .. lock)
  end
end

-- Put the caller, who may not take the lock, into the queue, or remove it when it no longer waits; return the reply of
-- acquire.lua for it. `ticket` is '' before the caller has drawn one, which is `drawn` now.
local function wait_in_queue(counts, queue, id, name, channel, joins, ticket, drawn, left, first, now)
  local entry = channel .. '\n' .. id
  if joins then
    redis.call('ZADD', queue, 'NX', drawn, entry)
    redis.call('PEXPIRE', queue, QUEUE_LIFE_MS)
  elseif ticket ~= '' then
    redis.call('ZREM', queue, entry)
    count_waits(counts, now, name, waited_ms(ticket, now), 1, 1)
  end
  return {left, drawn, first and 1 or 0, redis.call('ZCARD', queue)}
end

-- Return nil when the caller may take the lock, otherwise the reply of acquire.lua for one who waits or gives up.
local function wait_for_turn(lock, counts, queue, value, id, name, channel, joins, ticket, now)
  local drawn = ticket ~= '' and ticket or whole(now)
  local free, left, first = may_take(lock, queue, value, id, channel, drawn, joins, now)
  if not free then
    return wait_in_queue(counts, queue, id, name, channel, joins, ticket, drawn, left, first, now)
  end
end

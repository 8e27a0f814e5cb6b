-- Whose turn it is at a lock that the caller does not hold; put in front of the scripts that wait in a queue.
--
-- A reservation that was not claimed shows a process that does not answer, and there may be more of them in the queue. So there
-- is a roll call: the first waiter of each process is told to try for the lock, and of those who do within ROLL_CALL_MS the first
-- in the queue has its turn. Whoever is ahead of it leaves the queue, is told, and comes back to its place when it can.
-- Meanwhile the value of the lock key is a reservation for the first who answered, with its ticket:
-- id \n 0 \n end (ms) \n channel \n ticket ; while nobody has answered, id and channel are empty and the ticket is '-'.

local ROLL_CALL_MS = 200
local ROLL_CALL = 500  -- so many entries of the queue are looked at

-- Tell the first waiter of each process ahead of the caller to try, and return whether there is none. Entries of processes that
-- are gone leave the queue, and so do those of the process that is `silent`: told of it, they come back when they can.
local function call_roll(queue, own, silent)
  local there, leave, first = {}, {}, true
  for _, entry in ipairs(redis.call('ZRANGE', queue, 0, ROLL_CALL - 1)) do
    if entry == own then
      break
    end
    local channel, id = string.match(entry, '^(.-)\n(.*)$')
    if there[channel] == nil or channel == silent then
      there[channel] = redis.pcall('PUBLISH', channel, id) ~= 0 and channel ~= silent
    end
    first = first and not there[channel]
    if not there[channel] then
      leave[#leave + 1] = entry
    end
  end
  if #leave > 0 then
    redis.call('ZREM', queue, unpack(leave))
  end
  return first
end

-- Take so many entries out of the queue, and tell them.
local function dismiss(queue, number)
  local gone = redis.call('ZPOPMIN', queue, math.min(number, ROLL_CALL))
  for i = 1, #gone, 2 do
    local channel, id = string.match(gone[i], '^(.-)\n(.*)$')
    redis.pcall('PUBLISH', channel, id)
  end
end

-- Take an entry out of the queue that has its turn, and those ahead of it.
local function call_up(queue, entry)
  local ahead = redis.call('ZRANK', queue, entry) or 0
  if ahead > 0 then
    dismiss(queue, ahead)
  end
  redis.call('ZREM', queue, entry)
end

-- Return whether the caller may take the lock. If not, also return how many ms are left until another try makes sense (negative:
-- unknown), and whether it is to come back then in any case, as the first who answered a roll call.
-- `value` is what the lock key holds, if it is not the caller's acquisition; `waits`: the caller joins the queue.
local function may_take(lock, queue, value, id, channel, ticket, waits, now)
  if not value then
    value = redis.call('EXISTS', queue) == 1 and hand_over(lock, queue, id)
    return not value or is_of(value, id), RESERVED_MS
  end
  local heir, ends, heirs_channel, since = string.match(value, '^([^\n]*)\n0\n(%d+)\n([^\n]*)\n?(.*)$')
  if not heir then
    return false, redis.call('PTTL', lock)
  end
  local left, overdue = until_end(ends, now)
  local rolling, own = since ~= '', channel .. '\n' .. id
  if heir == id and (overdue or not rolling or not waits) then
    if rolling then
      call_up(queue, own)
    end
    return true
  end
  if not (overdue or rolling) then
    return false, left
  end
  if waits then
    redis.call('ZADD', queue, 'NX', ticket, own)
  end

  if overdue and rolling then  -- and the caller is not the first who answered
    if heir ~= '' then
      call_up(queue, heirs_channel .. '\n' .. heir)
      if redis.pcall('PUBLISH', heirs_channel, heir) ~= 0 then
        reserve(lock, heir, heirs_channel)
        return false, RESERVED_MS
      end
    elseif waits then  -- now there is one who answers
      call_up(queue, own)
      return true
    else
      dismiss(queue, ROLL_CALL)
    end
  end
  if overdue then
    local first = call_roll(queue, own, heirs_channel ~= channel and heirs_channel)
    if redis.call('EXISTS', queue) == 0 then
      return true
    end
    if first and waits then
      call_up(queue, own)
      return true
    end
    heir, since, left = '', '-', ROLL_CALL_MS
    ends = whole(math.floor(now / 1000) + left)
  end
  local answers = waits and (heir == '' or tonumber(ticket) < tonumber(since))
  if answers then
    if redis.call('ZRANK', queue, own) == 0 then
      redis.call('ZREM', queue, own)
      return true
    end
    heir, heirs_channel, since = id, channel, ticket
  elseif overdue then
    heirs_channel = ''
  end
  if answers or overdue then
    redis.call('SET', lock, heir .. '\n0\n' .. ends .. '\n' .. heirs_channel .. '\n' .. since, 'PX', left + REMEMBERED_MS)
  end
  return false, left, heir == id
end

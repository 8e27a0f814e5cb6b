-- Whose turn it is at a lock that the caller does not hold; put in front of scripts that queue, after counts.lua.
--
-- A reservation that was not claimed shows a process that does not answer, and the queue may have more entries of such
-- processes. So all waiters of other processes leave the queue and are woken: those who live come back by their tickets,
-- to their places, as they do after a loss of the queue. Meanwhile the lock is reserved for nobody, an empty id.

local COME_BACK_MS = 200
local CALLED_BACK = 500  -- entries of the queue at most

-- Return an error when the attempt to which a call belongs was given up before the call arrived, else nil.
local function given_up(undone)
  if redis.call('EXISTS', undone) == 1 then
    return redis.error_reply('ERR The attempt was given up before this call arrived.')
  end
end

local called_back = false  -- by this call of the script, which may look at several slots

-- Remove the first waiters from the queue, without those of the caller's process, and wake them; return whether any of
-- them may come back.
local function call_back(queue, own_channel)
  local gone = {}
  for _, entry in ipairs(redis.call('ZRANGE', queue, 0, CALLED_BACK - 1)) do
    local channel, id = string.match(entry, '^(.-)\n(.*)$')
    if channel ~= own_channel then
      gone[#gone + 1] = entry
      called_back = redis.pcall('PUBLISH', channel, id) ~= 0 or called_back
    end
  end
  if #gone > 0 then
    redis.call('ZREM', queue, unpack(gone))
  end
  return called_back
end

-- Return whether the caller may take the lock. If not, also return how many ms are left until another try makes sense
-- (negative: unknown). `value` is the lock key's, if it is not the caller's acquisition; `joins`: the caller joins the
-- queue.
local function may_take(lock, queue, value, id, channel, ticket, joins, now)
  if value then
    local next_id, ends, next_channel = string.match(value, '^([^\n]*)\n0\n(%d+)\n(.*)$')
    if not next_id then
      return false, redis.call('PTTL', lock)
    elseif next_id == id then
      return true
    end
    local left, overdue = until_end(ends, now)
    if not overdue then
      return false, left
    elseif next_channel ~= '' and next_channel ~= channel and call_back(queue, channel) then
      reserve(lock, '', '', COME_BACK_MS)
      return false, COME_BACK_MS
    elseif joins then
      redis.call('ZADD', queue, 'NX', ticket, channel .. '\n' .. id)
    end
  end
  value = redis.call('EXISTS', queue) == 1 and hand_over(lock, queue, id)
  return not value or is_of(value, id), RESERVED_MS
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
local function wait_in_queue(counts, queue, id, name, channel, joins, ticket, drawn, left, now)
  local entry = channel .. '\n' .. id
  if joins then
    redis.call('ZADD', queue, 'NX', drawn, entry)
    redis.call('PEXPIRE', queue, QUEUE_LIFE_MS)
  elseif ticket ~= '' then
    redis.call('ZREM', queue, entry)
    count_waits(counts, now, name, waited_ms(ticket, now), 1, 1)
  end
  return {left, drawn, redis.call('ZCARD', queue)}
end

-- Return nil when the caller may take the lock, otherwise the reply of acquire.lua for one who waits or gives up.
local function wait_for_turn(lock, counts, queue, value, id, name, channel, joins, ticket, now)
  local drawn = ticket ~= '' and ticket or whole(now)
  local free, left = may_take(lock, queue, value, id, channel, drawn, joins, now)
  if not free then
    return wait_in_queue(counts, queue, id, name, channel, joins, ticket, drawn, left, now)
  end
end

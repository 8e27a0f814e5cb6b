-- How a free lock passes to its first waiter, and which waiters are gone; put in front of scripts that read a queue.

-- Write a reservation of so many ms for a waiter that was woken (an empty id: for nobody), and return it.
local function reserve(lock, id, channel, ms)
  local value = id .. '\n0\n' .. whole(math.floor(now_us() / 1000) + ms) .. '\n' .. channel
  redis.call('SET', lock, value, 'PX', ms + REMEMBERED_MS)
  return value
end

local listens = {}  -- by channel

-- Remove waiters whose process is gone from the first entries of the queue, and return their number. A waiter that lost
-- its connection comes back to its place when it has a new one.
local function drop_gone(queue, number)
  local entries, channels, asked, gone = redis.call('ZRANGE', queue, 0, number - 1), {}, {}, {}
  for i, entry in ipairs(entries) do
    local channel = string.match(entry, '^[^\n]*')
    channels[i] = channel
    if listens[channel] == nil then
      listens[channel] = true
      asked[#asked + 1] = channel
    end
  end
  if #asked > 0 then
    local counts = redis.pcall('PUBSUB', 'NUMSUB', unpack(asked))  -- without the permission, all count as alive
    for i = 1, #counts, 2 do
      listens[counts[i]] = counts[i + 1] > 0
    end
  end
  for i, entry in ipairs(entries) do
    local channel = channels[i]
    if not listens[channel] then
      gone[#gone + 1] = entry
      redis.pcall('PUBLISH', channel, string.sub(entry, #channel + 2))  -- it may listen at another node of a Cluster
    end
  end
  if #gone > 0 then
    redis.pcall('ZREM', queue, unpack(gone))  -- a replica refuses it
  end
  return #gone
end

-- Remove the first waiter that may have the lock from the queue, and return its entry. The waiters for a semaphore have
-- one queue for all slots, and perhaps different limits: the id of each ends with its own, and a slot above it is not
-- for that waiter.
local function next_in(queue, lock)
  local slot = tonumber(string.match(lock, '^[^}]*}:lock:slot:.*:(%d+)$') or '1')
  if slot == 1 then
    return redis.call('ZPOPMIN', queue)[1]
  end
  for last = 0, MAX_CHECKED - 1, MAX_CHECKED - 1 do  -- mostly it is the first one
    for _, entry in ipairs(redis.call('ZRANGE', queue, 0, last)) do
      if slot <= tonumber(string.match(entry, '/(%d+)$') or slot) then
        redis.call('ZREM', queue, entry)
        return entry
      end
    end
  end
end

-- Reserve a free lock for the first waiter that still listens, and return the new value of the lock key (false: none).
-- A waiter whose connection is gone is passed over. `own` is the caller's id, which needs no wake-up.
local function hand_over(lock, queue, own)
  for passed = 1, PASSED_OVER do
    local first = next_in(queue, lock)
    if not first then
      redis.call('DEL', lock)
      return false
    end
    local channel, id = string.match(first, '^(.-)\n(.*)$')
    if id == own or redis.pcall('PUBLISH', channel, id) ~= 0 then
      return reserve(lock, id, channel, RESERVED_MS)
    end
    if passed == 1 then  -- there may be many of them
      drop_gone(queue, MAX_CHECKED)
    end
  end
  -- So many processes died at once: the next try for the lock goes on with the rest of the queue.
  return reserve(lock, '', '', 0)
end

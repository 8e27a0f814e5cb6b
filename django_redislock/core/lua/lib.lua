-- What several scripts share; put in front of each of them when they are loaded.
--
-- The value of a lock key is  id \n fence \n acquired (ms) \n record  and its expiry is the lock's life.
-- Fence 0 marks a reservation: the lock is free, but kept a moment for the waiter of that id. Its value is
-- id \n 0 \n end (ms) \n channel , and it stays a while after its end, to tell who did not come.
-- A queue is a sorted set of  channel \n id  by the ticket (server clock, us) that each waiter drew.

local RESERVED_MS = 500       -- a signalled waiter claims within this, or the next one is served
local REMEMBERED_MS = 5000    -- then it is known for so long that its process does not answer
local QUEUE_LIFE_MS = 120000  -- waiters come back and renew it far more often
local RECEIPT_LIFE_MS = 30000 -- outlives every retry of one release
local FENCE_LIFE_MS = 86400000 -- the clock may step back by less than this and fences still grow
local INDEX_LIFE_MS = 30 * 86400000
local WAITS_WINDOW_US = 600 * 1000000  -- waits are counted by ten minutes
local WAITS_LIFE_MS = 80 * 60000       -- and kept for the last hour
local WAITS_NAMES = 16                 -- for so many names of a bucket

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function whole(number)  -- Lua would write large numbers with an exponent
  return string.format('%.0f', number)
end

local function is_of(value, id)
  return string.sub(value, 1, #id + 1) == id .. '\n'
end

local function fence_of(value)
  return string.match(value, '^[^\n]*\n(%d+)\n')
end

local function index(held, name, now, life_ms)
  local now_ms = math.floor(now / 1000)
  redis.call('ZADD', held, now_ms + life_ms, name)
  redis.call('PEXPIRE', held, math.max(INDEX_LIFE_MS, life_ms))
  if now % 8 == 0 then  -- now and then, what ended without a release
    redis.call('ZREMRANGEBYSCORE', held, '-inf', '(' .. now_ms)
  end
end

-- Draw a fence larger than every earlier one, even when the server lost its data: then its clock has moved on.
local function next_fence(counter, now)
  local fence = whole(now)
  local last = redis.call('SET', counter, fence, 'PX', FENCE_LIFE_MS, 'GET')
  if last and tonumber(last) >= now then
    fence = whole(last + 1)
    redis.call('SET', counter, fence, 'PX', FENCE_LIFE_MS)
  end
  return fence
end

-- Write the caller into a lock that is free or reserved for it (`value` is what the key holds), and return its fence and
-- whether it had been taken under that id before. That one is not shortened: its holder believes in its life.
local function take(lock, held, counter, value, id, name, record, now, life_ms)
  local fence = value and fence_of(value) or '0'
  index(held, name, now, life_ms)  -- first: should it fail, nothing is taken
  if fence ~= '0' then  -- and that reply was lost, or somebody else knows the id
    redis.call('PEXPIRE', lock, math.max(life_ms, redis.call('PTTL', lock)))
    return fence, true
  end
  fence = next_fence(counter, now)
  redis.call('SET', lock, id .. '\n' .. fence .. '\n' .. whole(math.floor(now / 1000)) .. '\n' .. record, 'PX', life_ms)
  return fence, false
end

-- Return how many ms are left of what the lock key holds (negative: unknown), and when a reservation was not claimed, the
-- channel of the process that did not come.
local function ms_left(lock, value, now)
  local ends, channel = string.match(value, '^[^\n]*\n0\n(%d+)\n(.*)$')
  if not ends then
    return redis.call('PTTL', lock)
  end
  local left = tonumber(ends) - math.floor(now / 1000)
  return left, (left <= 0 or left > 2 * RESERVED_MS) and channel or nil  -- so much only after the clock stepped back
end

-- Return when the key ends (ms; 0: never).
local function ends_at(key, now)
  local left = redis.call('PTTL', key)
  return left < 0 and 0 or math.floor(now / 1000) + left
end

-- Reserve a free lock for the first waiter that still listens, and return what the lock key then holds (false: nothing).
-- A waiter whose connection is gone is passed over, and so is everybody on the channel of a process that is `silent`: told
-- of it, they come back to the queue when they can. `own` is the caller's id: it need not be told.
local function hand_over(lock, queue, own, silent)
  while true do
    local first = redis.call('ZPOPMIN', queue)[1]
    if not first then
      redis.call('DEL', lock)
      return false
    end
    local channel, id = string.match(first, '^(.-)\n(.*)$')
    local told = id == own or redis.pcall('PUBLISH', channel, id)
    if told ~= 0 and (channel ~= silent or id == own) then
      local value = id .. '\n0\n' .. whole(math.floor(now_us() / 1000) + RESERVED_MS) .. '\n' .. channel
      redis.call('SET', lock, value, 'PX', RESERVED_MS + REMEMBERED_MS)
      return value
    end
  end
end

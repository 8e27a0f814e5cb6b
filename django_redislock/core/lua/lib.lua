-- What several scripts share; put in front of each of them when they are loaded.
--
-- The value of a lock key is  id \n fence \n acquired (ms) \n record  and its expiry is the lock's life.
-- Fence 0 marks a reservation: the lock is free, but kept a moment for the waiter of that id. Its value is
-- id \n 0 \n end (ms) \n channel , and it stays a while after its end, to tell who did not come. More of it: turns.lua.
-- A queue is a sorted set of  channel \n id  by the ticket (server clock, us) that each waiter drew.
-- The receipts of a lock are a sorted set, by fence, of the fences that were released, of  id <id>  where a release named
-- no fence, and of  reset <id of the call> : the newest 1024, until two minutes after the last one.

local RESERVED_MS = 500       -- a signalled waiter claims within this, or the next one is served
-- No script keeps the server busy for more than 5 ms, so it goes through no more than so many entries of queues:
local LOOKED_AT = 1024
local PASSED_OVER = 250
local REMEMBERED_MS = 5000    -- then it is known for so long that its process does not answer
local QUEUE_LIFE_MS = 120000  -- waiters come back and renew it far more often
local RECEIPT_LIFE_MS = 120000 -- outlives every retry of one release
local RECEIPTS = 1024
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

-- Return an error that names the key when something else wrote what the lock key holds, else nil.
local function not_ours(lock, value)
  if value and not fence_of(value) then
    local advice = 'delete it, or give the lock another name or prefix.'
    return redis.error_reply('ERR The key ' .. lock .. ' holds what no lock wrote: ' .. advice)
  end
end

local function index(held, name, now, life_ms)
  local now_ms = math.floor(now / 1000)
  redis.call('ZADD', held, now_ms + life_ms, name)
  if redis.call('PTTL', held) < math.max(INDEX_LIFE_MS / 2, life_ms) then  -- never cut short for those that live longer
    redis.call('PEXPIRE', held, math.max(INDEX_LIFE_MS, life_ms))
  end
  if now % 8 == 0 then  -- now and then, what ended without a release
    local ended = redis.call('ZRANGEBYSCORE', held, '-inf', '(' .. now_ms, 'LIMIT', 0, 100)
    if #ended > 0 then
      redis.call('ZREM', held, unpack(ended))
    end
  end
end

-- Keep a receipt of an end of the acquisition of that fence: when the call is repeated because its reply was lost, it gets the
-- same answer. Fences grow, so their order is that of time.
local function keep_receipt(receipts, receipt, fence)
  redis.call('ZADD', receipts, fence, receipt)
  redis.call('PEXPIRE', receipts, RECEIPT_LIFE_MS)
  if tonumber(fence) % 16 == 0 then
    redis.call('ZREMRANGEBYRANK', receipts, 0, -RECEIPTS - 1)
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

-- Return how many ms are left of a reservation, and whether it has ended.
local function until_end(ends, now)
  local left = tonumber(ends) - math.floor(now / 1000)
  return left, left <= 0 or left > 2 * RESERVED_MS  -- so much only after the clock stepped back
end

-- Write a reservation for a waiter who was told, and return it.
local function reserve(lock, id, channel)
  local value = id .. '\n0\n' .. whole(math.floor(now_us() / 1000) + RESERVED_MS) .. '\n' .. channel
  redis.call('SET', lock, value, 'PX', RESERVED_MS + REMEMBERED_MS)
  return value
end

-- Return when the key ends (ms; 0: never).
local function ends_at(key, now)
  local left = redis.call('PTTL', key)
  return left < 0 and 0 or math.floor(now / 1000) + left
end

local listens = {}  -- by channel

-- Take those whose process is gone out of the first entries of the queue, and return how many they were. One that has lost its
-- connection comes back to its place when it has a new one.
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
    local counts = redis.pcall('PUBSUB', 'NUMSUB', unpack(asked))  -- who may not ask takes all for living
    for i = 1, #counts, 2 do
      listens[counts[i]] = counts[i + 1] > 0
    end
  end
  for i, entry in ipairs(entries) do
    if not listens[channels[i]] then
      gone[#gone + 1] = entry
    end
  end
  if #gone > 0 then
    redis.pcall('ZREM', queue, unpack(gone))  -- a replica refuses it
  end
  return #gone
end

-- Reserve a free lock for the first waiter that still listens, and return what the lock key then holds (false: nothing).
-- A waiter whose connection is gone is passed over. `own` is the caller's id: it need not be told.
local function hand_over(lock, queue, own)
  for passed = 1, PASSED_OVER do
    local first = redis.call('ZPOPMIN', queue)[1]
    if not first then
      redis.call('DEL', lock)
      return false
    end
    local channel, id = string.match(first, '^(.-)\n(.*)$')
    if id == own or redis.pcall('PUBLISH', channel, id) ~= 0 then
      return reserve(lock, id, channel)
    end
    if passed == 1 then  -- there may be many of them
      drop_gone(queue, LOOKED_AT)
    end
  end
  -- So many dead at once: whoever looks next goes on with the rest.
  local value = '\n0\n' .. whole(math.floor(now_us() / 1000)) .. '\n'
  redis.call('SET', lock, value, 'PX', REMEMBERED_MS)
  return value
end

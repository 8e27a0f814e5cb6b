-- Acquire the lock; when it is taken, join its queue or leave it.
-- KEYS  1 lock, 2 index of held locks, 3 fence counter, 4 queue
-- ARGV  1 id, 2 expire (ms), 3 name, 4 record, 5 channel of the waiter, 6 '1' to join the queue, 7 ticket ('': draw one)
-- Returns the fence when acquired, else {ms until another try makes sense (negative: unknown), ticket}.

-- Add a wait that ended to the counts of its ten minutes. They take up bounded space: of each of the 64 buckets, the names that
-- were waited for longest are kept. A failure is of no account.
local function count_wait(name, began, now, gave_up)
  local tag = string.sub(KEYS[2], 1, -5)  -- without 'held'
  local window = math.floor(now / WAITS_WINDOW_US)
  local names, counts = tag .. 'waits:' .. window, tag .. 'waited:' .. window
  local waited_ms = math.max(0, math.floor((now - tonumber(began)) / 1000))
  local minute = math.floor(now / 60000000)
  redis.pcall('ZINCRBY', names, waited_ms, name)
  if redis.pcall('ZCARD', names) == WAITS_NAMES + 1 then
    local least = redis.pcall('ZRANGE', names, 0, 1)
    local leaves = least[1] == name and least[2] or least[1]
    if leaves then
      redis.pcall('ZREM', names, leaves)
      redis.pcall('HDEL', counts, 'n' .. leaves, 'g' .. leaves)
    end
  end
  redis.pcall('HINCRBY', counts, 'n' .. name, 1)
  if gave_up then
    redis.pcall('HINCRBY', counts, 'g' .. name, 1)
  end
  redis.pcall('HINCRBY', counts, 'ms:' .. minute, waited_ms)
  redis.pcall('HINCRBY', counts, 'waits:' .. minute, 1)
  redis.pcall('PEXPIRE', names, WAITS_LIFE_MS)
  redis.pcall('PEXPIRE', counts, WAITS_LIFE_MS)
end

local id, life_ms = ARGV[1], tonumber(ARGV[2])
local now = now_us()
local value = redis.call('GET', KEYS[1])

local left, silent
if value and not is_of(value, id) then
  left, silent = ms_left(KEYS[1], value, now)
end
if silent or not value and redis.call('EXISTS', KEYS[4]) == 1 then
  value = hand_over(KEYS[1], KEYS[4], id, silent)
  left = RESERVED_MS
end

if value and not is_of(value, id) then
  local entry = ARGV[5] .. '\n' .. id
  local ticket = ARGV[7] ~= '' and ARGV[7] or whole(now)
  if ARGV[6] == '1' then
    redis.call('ZADD', KEYS[4], 'NX', ticket, entry)
    redis.call('PEXPIRE', KEYS[4], QUEUE_LIFE_MS)
  elseif ARGV[7] ~= '' then
    redis.call('ZREM', KEYS[4], entry)
    count_wait(ARGV[3], ARGV[7], now, true)
  end
  return {left, ticket}
end

local fence = take(KEYS[1], KEYS[2], KEYS[3], value, id, ARGV[3], ARGV[4], now, life_ms)
if ARGV[7] ~= '' then
  count_wait(ARGV[3], ARGV[7], now, false)
end
return tonumber(fence)

-- Acquire the lock; when it is taken, join its queue or leave it.
-- KEYS  1 lock, 2 index of held locks, 3 fence counter, 4 queue
-- ARGV  1 id, 2 expire (ms), 3 name, 4 record, 5 channel of the waiter, 6 '1' to join the queue, 7 ticket ('': draw one)
-- Returns the fence when acquired, the negative one when the id held the lock before, else {ms until another try makes sense (negative: unknown), ticket}.

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
    count_waits(KEYS[2], now, ARGV[3], waited_ms(ARGV[7], now), 1, 1)
  end
  return {left, ticket}
end

local fence, before = take(KEYS[1], KEYS[2], KEYS[3], value, id, ARGV[3], ARGV[4], now, life_ms)
if ARGV[7] ~= '' then
  count_waits(KEYS[2], now, ARGV[3], waited_ms(ARGV[7], now), 1, 0)
end
return before and -tonumber(fence) or tonumber(fence)

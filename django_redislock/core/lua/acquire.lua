-- Acquire the lock; when it is taken, join its queue or leave it.
-- KEYS  1 lock, 2 index of held locks, 3 fence counter, 4 queue, 5 receipts, if the id was given and may have released before
-- ARGV  1 id, 2 expire (ms), 3 name, 4 record, 5 channel of the waiter, 6 '1' to join the queue, 7 ticket ('': draw one)
-- Returns the fence when acquired, negative when the id held the lock before; else {ms until another try makes sense (negative:
-- unknown), ticket}, and 1 as third when the caller is to try then even if others of its process wait for the same lock.

local id, life_ms = ARGV[1], tonumber(ARGV[2])
local value = redis.call('GET', KEYS[1])
local wrong = not_ours(KEYS[1], value)
if wrong then
  return wrong
end

if not (value and is_of(value, id) and fence_of(value) ~= '0') then
  local ticket, waits = ARGV[7] ~= '' and ARGV[7] or whole(now), ARGV[6] == '1'
  local free, left, first = may_take(KEYS[1], KEYS[4], value, id, ARGV[5], ticket, waits, now)
  if not free then
    local entry = ARGV[5] .. '\n' .. id
    if waits then
      redis.call('ZADD', KEYS[4], 'NX', ticket, entry)
      redis.call('PEXPIRE', KEYS[4], QUEUE_LIFE_MS)
    elseif ARGV[7] ~= '' then
      redis.call('ZREM', KEYS[4], entry)
      count_waits(KEYS[2], now, ARGV[3], waited_ms(ARGV[7], now), 1, 1)
    end
    return {left, ticket, first and 1 or nil}
  end
  value = false
end

local fence, before = take(KEYS[1], KEYS[2], KEYS[3], value, id, ARGV[3], ARGV[4], now, life_ms)
if ARGV[7] ~= '' then
  count_waits(KEYS[2], now, ARGV[3], waited_ms(ARGV[7], now), 1, 0)
end
if KEYS[5] then
  redis.call('ZREM', KEYS[5], 'id ' .. id)
end
return before and -tonumber(fence) or tonumber(fence)

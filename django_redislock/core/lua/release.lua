-- Release the lock and hand it to the first waiter; also drops a claim that was given up.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipt of this id
-- ARGV  1 id, 2 name, 3 channel the caller waited on ('': it did not), 4 fence of the acquisition ('': any of this id)
-- Returns 1 when released, by this call or by an earlier one whose reply was lost; 0 when the lock is not the caller's.
local id, fence = ARGV[1], ARGV[4]
local value = redis.call('GET', KEYS[1])
local held = value and is_of(value, id) and fence_of(value)
if held and (fence == '' or fence == held) then
  if held ~= '0' then
    redis.pcall('ZREM', KEYS[2], ARGV[2])
    redis.call('SET', KEYS[4], held, 'PX', RECEIPT_LIFE_MS)
  end
  hand_over(KEYS[1], KEYS[3], id)
  return 1
end
if ARGV[3] ~= '' then
  redis.call('ZREM', KEYS[3], ARGV[3] .. '\n' .. id)
end
local receipt = redis.call('GET', KEYS[4])
return receipt and (fence == '' or fence == receipt) and 1 or 0

-- Release the lock and hand it to the first waiter; also drops a claim that was given up.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts
-- ARGV  1 id, 2 name, 3 channel the caller waited on ('': it did not), 4 fence of the acquisition ('': any of this id)
-- Returns 1 when released, by this call or by an earlier one whose reply was lost; 0 when the lock is not the caller's.
local id, fence = ARGV[1], ARGV[4]
local by_id = 'id ' .. id
if ARGV[3] ~= '' then
  redis.call('ZREM', KEYS[3], ARGV[3] .. '\n' .. id)
end
local value = redis.call('GET', KEYS[1])
local held = value and (fence == '' and is_of(value, id) and fence_of(value) or is_of(value, id .. '\n' .. fence) and fence)
if held then
  if held ~= '0' then
    redis.pcall('ZREM', KEYS[2], ARGV[2])
    keep_receipt(KEYS[4], held, held)
    if fence == '' then
      keep_receipt(KEYS[4], by_id, held)
    end
  end
  hand_over(KEYS[1], KEYS[3], id)
  return 1
end
return redis.call('ZSCORE', KEYS[4], fence == '' and by_id or fence) and 1 or 0

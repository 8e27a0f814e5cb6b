-- Release the lock and hand it to the first waiter; also drops a claim that was given up.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipt of this id
-- ARGV  1 id, 2 name, 3 channel the caller waited on ('': it did not)
-- Returns 1 when released, by this call or by an earlier one whose reply was lost; 0 when the lock is not this id's.
local id = ARGV[1]
local value = redis.call('GET', KEYS[1])
if value and is_of(value, id) then
  if fence_of(value) ~= '0' then
    redis.call('ZREM', KEYS[2], ARGV[2])
    redis.call('SET', KEYS[4], '', 'PX', RECEIPT_LIFE_MS)
  end
  hand_over(KEYS[1], KEYS[3], id)
  return 1
end
if ARGV[3] ~= '' then
  redis.call('ZREM', KEYS[3], ARGV[3] .. '\n' .. id)
end
return redis.call('EXISTS', KEYS[4])

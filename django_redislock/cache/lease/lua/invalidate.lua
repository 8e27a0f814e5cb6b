-- End leases, so that the values of running computations are not stored; the first waiter for each computes it again.
-- KEYS  for each value: lock, index of held locks, queue, witness
-- ARGV  for each value: name
-- Returns how many leases there were.
local ended = 0
for i = 1, #ARGV do
  local lock, held, queue, witness = KEYS[4 * i - 3], KEYS[4 * i - 2], KEYS[4 * i - 1], KEYS[4 * i]
  local value = redis.call('GET', lock)
  redis.call('DEL', witness)
  if value and (fence_of(value) or '0') ~= '0' then
    redis.call('ZREM', held, ARGV[i])
    hand_over(lock, queue, '')
    ended = ended + 1
  end
end
return ended

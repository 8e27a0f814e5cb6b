-- End leases, so that the values of running computations are not stored; the first waiter for each computes it again.
-- KEYS  for each value: lock, index of held locks, queue, witness
-- ARGV  for each value: name
-- Returns the number of leases that were ended.
local ended = 0
for i, name in ipairs(ARGV) do
  local lock, index, queue, witness = unpack(KEYS, 4 * i - 3, 4 * i)
  local value = redis.call('GET', lock)
  redis.call('DEL', witness)
  if value and (fence_of(value) or '0') ~= '0' then
    redis.call('ZREM', index, name)
    hand_over(lock, queue, '')
    ended = ended + 1
  end
end
return ended

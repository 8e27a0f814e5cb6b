-- End leases, so that the values of running computations are not stored; the first waiter for each computes it again.
-- KEYS  for each value: lock, index of held locks, queue, witness; after all of these the values, if they are known
-- ARGV  '1' to delete these values, else '0'; for each value: name
-- Returns the number of leases that were ended.
--
-- The delete is here because it ends the computations that began before it, also when it deletes a value that was set
-- after one of them began: that one would not find the value, and would store an older one.
local ended, deletes = 0, table.remove(ARGV, 1) == '1'
for i = 4 * #ARGV + 1, deletes and #KEYS or 0 do
  redis.call('DEL', KEYS[i])
end
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

-- Release the lock and hand it to the first waiter; also give up a reservation, or a place in the queue.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts; slots 2 and up of a semaphore, of whose slots the caller does
--       not know which one it has: then the lock is slot 1
-- ARGV  1 id, 2 name, 3 channel of the waiter ('': it did not wait), 4 fence of the acquisition ('': any of this id),
--       5 receipt: no other holder releases under the same one, so that none takes another's release for its own,
--       6 mark in the record, if only an acquisition that has it, or a reservation, is released
-- Returns 1 when released, by this call or by an earlier one whose reply was lost; 0 when the caller does not hold it.
-- The KEYS and ARGV are named in quick_release.lua.
if channel ~= '' then
  redis.call('ZREM', queue, channel .. '\n' .. id)
end
local released = 0
for i = 4, #KEYS do
  local slot = i > 4 and KEYS[i] or lock
  local value = unmarked(redis.call('GET', slot))
  local held_fence = value and (fence == '' and is_of(value, id) and fence_of(value)
    or is_of(value, id .. '\n' .. fence) and fence)
  if held_fence and (not mark or held_fence == '0' or string.find(value, mark, 1, true)) then
    if held_fence ~= '0' then
      redis.pcall('ZREM', held, string.find(name, '^slot:.*:$') and name .. i - 3 or name)
      keep_receipt(receipts, receipt, held_fence)
    end
    hand_over(slot, queue, '')  -- of a given id another caller may wait, who is woken as well
    released = 1
  end
end
if released == 1 or redis.call('ZSCORE', receipts, receipt) then
  return 1
end
redis.call('PEXPIRE', receipts, RECEIPT_LIFE_MS)  -- a replica may lack the lock; it refuses writes, and is not believed
return 0

-- Release the lock and hand it to the first waiter; also give up a reservation, or a place in the queue.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts
-- ARGV  1 id, 2 name, 3 channel of the waiter ('': it did not wait), 4 fence of the acquisition ('': any of this id),
--       5 receipt: no other holder releases under the same one, so that none takes another's release for its own
-- Returns 1 when released, by this call or by an earlier one whose reply was lost; 0 when the caller does not hold it.
local lock, held, queue, receipts = unpack(KEYS)
local id, name, channel, fence, receipt = unpack(ARGV)
if channel ~= '' then
  redis.call('ZREM', queue, channel .. '\n' .. id)
end
local value = redis.call('GET', lock)
local held_fence = value and (fence == '' and is_of(value, id) and fence_of(value)
  or is_of(value, id .. '\n' .. fence) and fence)
if held_fence then
  if held_fence ~= '0' then
    redis.pcall('ZREM', held, name)
    keep_receipt(receipts, receipt, held_fence)
  end
  hand_over(lock, queue, '')  -- of a given id another caller may wait, who is woken as well
  return 1
end
if redis.call('ZSCORE', receipts, receipt) then
  return 1
end
redis.call('PEXPIRE', receipts, RECEIPT_LIFE_MS)  -- a replica may lack the lock; it refuses writes, and is not believed
return 0

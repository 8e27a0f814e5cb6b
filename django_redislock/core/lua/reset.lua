-- Take the lock from whoever holds it and hand it to the first waiter.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts, 5 of a lease: the witness of its value
-- ARGV  1 name, 2 fence of the acquisition to end ('': any), 3 id of this call
-- Returns 1 when freed, 0 when nobody held it, -1 when another acquisition holds it.
local receipt = 'reset ' .. ARGV[3]
if redis.call('ZSCORE', KEYS[4], receipt) then  -- done before, and that reply was lost
  return 1
end
local value = redis.call('GET', KEYS[1])
local wrong = not_ours(KEYS[1], value)
if wrong then
  return wrong
end
local fence = value and fence_of(value) or '0'
if fence == '0' then
  return 0
end
if ARGV[2] ~= '' and ARGV[2] ~= fence then
  return -1
end
redis.pcall('ZREM', KEYS[2], ARGV[1])
if KEYS[5] then
  redis.call('DEL', KEYS[5])
end
keep_receipt(KEYS[4], receipt, fence)
hand_over(KEYS[1], KEYS[3], '')
return 1

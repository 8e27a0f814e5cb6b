-- Take the lock from whoever holds it and hand it to the first waiter.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts, 5 the lock's notes of forced releases (former holders read
--       them), 6 the witness of what its holder works on
-- ARGV  1 name, 2 fence of the acquisition to end ('': any), 3 id of this call, 4 user \n reason
-- Returns 1 when freed, 0 when nobody held it, -1 when another acquisition holds it.
-- A note is  fence \n time (ms) \n user \n reason , and its score is the fence. The newest 16 notes of a lock are kept,
-- as long as a former holder may believe that it holds the lock.
local NOTES = 16
local NOTE_LIFE_MS = 120000  -- beyond the life that the lock had left
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
redis.call('DEL', KEYS[6])
keep_receipt(KEYS[4], receipt, fence)
local note = fence .. '\n' .. whole(math.floor(now_us() / 1000)) .. '\n' .. ARGV[4]
local life_ms = math.max(redis.call('PTTL', KEYS[1]), 0) + NOTE_LIFE_MS
redis.call('ZADD', KEYS[5], fence, note)
redis.call('ZREMRANGEBYRANK', KEYS[5], 0, -NOTES - 1)
redis.call('PEXPIRE', KEYS[5], math.max(redis.call('PTTL', KEYS[5]), life_ms))
hand_over(KEYS[1], KEYS[3], '')
return 1

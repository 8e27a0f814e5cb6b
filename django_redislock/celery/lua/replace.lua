-- Give a message that waits the arguments of a duplicate, which is not published.
-- KEYS  1 lock, 2 receipts
-- ARGV  1 id of the message, 2 fence, 3 arguments (base64), 4 receipt: another one for each duplicate
-- Returns 1 when the message got them, in this call or in an earlier one whose reply was lost; 0 when it waits no more.
local lock, receipts = unpack(KEYS)
local id, fence, arguments, receipt = unpack(ARGV)
if redis.call('ZSCORE', receipts, receipt) then
  return 1
end
local value = redis.call('GET', lock)
-- A replica may lack the lock. It refuses this write, and is not believed. On a full server, what takes memory may be
-- written only after it.
redis.call('PEXPIRE', receipts, RECEIPT_LIFE_MS)
if not (value and is_of(value, id .. '\n' .. fence)) then
  return 0
end
keep_receipt(receipts, receipt, whole(now_us()))  -- by their time, because all replacements are under one fence
-- In the value of the lock, so that they live as long as it does, also when the message is published again.
local before = string.gsub(value, ',"newest":"[^"]*"}$', '}')
redis.call('SET', lock, string.sub(before, 1, -2) .. ',"newest":"' .. arguments .. '"}', 'KEEPTTL')
return 1

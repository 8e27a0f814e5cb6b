-- Release the lock that a message held while it waited, and tell with which arguments it runs.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts, 5 newest arguments, for all copies of the message
-- ARGV  1 id, 2 name, 3 expiry of the newest arguments (ms), 4 '1' to note also that a message began with its own ones
-- Returns {1 when the message held the lock until this call, else 0; the newest arguments (base64) with which it began, in
-- this call or an earlier one, '' when it is noted that it began with its own ones, else nil}.
local lock, held, queue, receipts, arguments = unpack(KEYS)
local id, name, expire_ms, notes = unpack(ARGV)
local value, waited = redis.call('GET', lock), 0
local fence = value and is_of(value, id) and fence_of(value)
if fence then
  -- First what takes no memory, as in leave.lua.
  if fence ~= '0' then
    redis.pcall('ZREM', held, name)
    keep_receipt(receipts, 'id ' .. id, fence)
  end
  hand_over(lock, queue, '')
  waited = 1
  local newest = string.match(value, ',"newest":"([^"]*)"}$')
  if newest then
    redis.call('SET', arguments, newest, 'PX', expire_ms)
  elseif notes == '1' then
    redis.call('SET', arguments, '', 'PX', expire_ms, 'NX')
  end
else
  redis.call('PEXPIRE', receipts, RECEIPT_LIFE_MS)  -- a replica may lack the lock; it refuses writes, and is not believed
end
return {waited, redis.call('GET', arguments)}

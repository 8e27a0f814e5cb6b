-- Take the lock of a message that waits in its worker, or is published again; one that it holds it takes anew, because
-- others may still set the expiry of the former acquisition, and it keeps the arguments of its duplicates.
-- KEYS  1 lock, 2 index of held locks, 3 fence counter, 4 queue, 5 newest arguments, 6 note that this attempt is given up,
--       7 receipts
-- ARGV  1 id, 2 expire (ms), 3 name, 4 record
-- Returns the fence, negative when the message held no lock and began nowhere; 0 when somebody else holds the lock.
local lock, held, counter, queue, arguments, undone, receipts = unpack(KEYS)
local id, expire_ms, name, record = unpack(ARGV)
local value, now = redis.call('GET', lock), now_us()
local wrong = not_ours(lock, value) or given_up(undone)
if wrong then
  return wrong
end
local held_before = value and is_of(value, id) and fence_of(value) ~= '0'
if held_before then
  local newest = string.match(value, ',"newest":"[^"]*"}$')
  record = newest and string.sub(record, 1, -2) .. newest or record
elseif not may_take(lock, queue, value, id, '', '', false, now) then
  return 0
end
redis.call('ZREM', receipts, 'id ' .. id)
local fence = tonumber((take(lock, held, counter, false, id, name, record, now, tonumber(expire_ms))))
return (held_before or redis.call('EXISTS', arguments) == 1) and fence or -fence

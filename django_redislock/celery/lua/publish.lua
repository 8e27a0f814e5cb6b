-- Take the lock of a message that is published, or tell who holds it; or give a message that waits newer arguments.
-- KEYS  1 lock, 2 index of held locks, 3 fence counter, 4 queue, 5 note that this attempt is given up (undone.lua), 6
--       counts of the bucket; 7 receipts, unless the id is new; to wait on, 8 newest arguments for all copies of the
--       message. To replace arguments: 1 lock, 2 receipts
-- ARGV  1 verb: 'new' or 'known' (the id of the message), 'again' (it waits on), or 'replace'; 2 id, 3 expire (ms), 4
--       name, 5 record; to replace arguments: 2 id and 6 fence of the message that waits, 7 the arguments (base64), 8
--       receipt: another one for each duplicate
-- Returns the fence when acquired, negative when the id held the lock before, or, to wait on, when the message had lost
-- it and began nowhere; else {value of the lock key, ms left, waiters, now (ms)}, or {} when nobody holds the lock and
-- another one has its turn. A refusal of a new id is counted as a prevented duplicate. To replace arguments: 1 when the
-- message got them, in this call or in an earlier one whose reply was lost, 0 when it waits no more.
local value = redis.call('GET', lock)
local wrong = not_ours(lock, value) or given_up(undone)
if wrong then
  return wrong
end
local holds = value and is_of(value, id) and fence_of(value) ~= '0'
if not holds and not may_take(lock, queue, value, id, '', '', false, now) then
  if not value or fence_of(value) == '0' then
    return {}
  end
  if verb == 'new' then
    pcall(add, counts, now, name, 0, 0, 0, 1, 0)
  end
  return {value, redis.call('PTTL', lock), redis.call('ZCARD', queue), math.floor(now / 1000)}
end
if receipts then
  redis.call('ZREM', receipts, 'id ' .. id)
end
if verb ~= 'again' then
  local got, before = take(lock, held, counter, holds and value, id, name, record, now, expire_ms)
  return before and -tonumber(got) or tonumber(got)
end
-- Anew, because others may still set the expiry of the former acquisition; but with the arguments of its duplicates.
local kept = holds and string.match(value, OWN_NEWEST)
record = kept and string.sub(record, 1, -2) .. kept or record
local got = tonumber((take(lock, held, counter, false, id, name, record, now, expire_ms)))
return (holds or redis.call('EXISTS', arguments) == 1) and got or -got

-- Force-release the lock of any holder, and hand it to the first waiter; or recall it: refuse its renewals from now on, so
-- that its holder gives it back, or it expires.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts, 5 notes of the lock's forced releases (former holders read
--       them), 6 witness: it exists while a computed value may be stored
-- ARGV  1 name, 2 fence of the acquisition to end ('': any), 3 id of this call, 4 user \n reason; 5 only to recall it
-- Returns 1 when freed or recalled, 2 when it was recalled before, 0 when nobody held it, -1 when another acquisition
-- holds it.
-- A note is  fence \n time (ms) \n user \n reason , after a recall with  \n recalled  behind it, and its score is the
-- fence. The newest 16 notes of a lock are kept, for as long as a former holder may believe that it holds the lock.
local lock, held, queue, receipts, notes, witness = unpack(KEYS)
local name, wanted_fence, call_id, user_and_reason, recalls = unpack(ARGV)
local MAX_NOTES = 16
local NOTE_LIFE_MS = 120000  -- after the expiry that the lock had
local receipt = 'reset ' .. call_id

-- A message that waits has the lock by an id made from its task's (task_names.py). No process relies on that lock, so
-- it is freed at once: the message itself would else wait for its end.
local function is_of_message(value)
  local id = string.match(value, '^[^\n]*')
  return string.find(value, '"kind":"celery"', 1, true) and not string.find(id, ':', 1, true)
    and (#id == 64 or string.find(value, '[' .. id .. ']"', 1, true))
end

if redis.call('ZSCORE', receipts, receipt) then  -- an earlier call did it, and its reply was lost
  return 1
end
local value, marked = unmarked(redis.call('GET', lock))
local wrong = not_ours(lock, value)
if wrong then
  return wrong
end
local fence = value and fence_of(value) or '0'
if fence == '0' then
  return 0
end
if wanted_fence ~= '' and wanted_fence ~= fence then
  return -1
end
if recalls and marked then
  return 2
end
redis.call('DEL', witness)
keep_receipt(receipts, receipt, fence)
local note = fence .. '\n' .. whole(math.floor(now_us() / 1000)) .. '\n' .. user_and_reason
note = note .. (recalls and '\nrecalled' or '')
local note_ms = math.max(redis.call('PTTL', lock), 0) + NOTE_LIFE_MS
redis.call('ZADD', notes, fence, note)
redis.call('ZREMRANGEBYRANK', notes, 0, -MAX_NOTES - 1)
redis.call('PEXPIRE', notes, math.max(redis.call('PTTL', notes), note_ms))
if recalls and not is_of_message(value) then
  redis.call('SET', lock, RECALLED .. value, 'KEEPTTL')
  return 1
end
redis.pcall('ZREM', held, name)
hand_over(lock, queue, '')
return 1

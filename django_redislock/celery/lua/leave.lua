-- End an execution: release the lock, or leave it to another id for a while; mark the message as processed.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts, 5 processed marker of the message
-- ARGV  1 id, 2 name, 3 fence, 4 expiry of the marker (ms, '': none), 5 id that keeps the lock ('': none), 6 its expiry
--       (ms), 7 its record then, 8 the marker: 'done', or 'ending' until the end is confirmed
-- Returns 1 when the lock was the caller's, in this call or in an earlier one whose reply was lost, else 0.
local lock, held, queue, receipts, marker = unpack(KEYS)
local id, name, fence, marker_ms, keep_id, keep_ms, record, state = unpack(ARGV)
local before = (marker_ms == '' or state ~= 'done') and redis.call('GET', marker)
local done = before and string.find(before, '^done')
if marker_ms == '' and done then  -- the message was revoked, so it does not come again
  keep_id = ''
end
local value, recalled = unmarked(redis.call('GET', lock))
local was_held = 1
keep_id = recalled and '' or keep_id  -- nothing makes its end later
-- The marker comes last: on a full server a script may write what takes memory only after it wrote what takes none, and
-- each lock stayed until its expiry.
if not (value and is_of(value, id .. '\n' .. fence)) then
  -- A replica may lack the lock. It refuses this write, and so it is not believed.
  redis.call('PEXPIRE', receipts, RECEIPT_LIFE_MS)
  was_held = redis.call('ZSCORE', receipts, fence) and 1 or 0
elseif keep_id ~= '' then
  redis.call('ZREM', receipts, 'id ' .. keep_id)
  keep_receipt(receipts, fence, fence)
  local now = now_us()
  local now_ms = whole(math.floor(now / 1000))
  redis.call('SET', lock, keep_id .. '\n' .. fence .. '\n' .. now_ms .. '\n' .. record, 'PX', keep_ms)
  index(held, name, now, tonumber(keep_ms))
else
  redis.pcall('ZREM', held, name)
  keep_receipt(receipts, fence, fence)
  hand_over(lock, queue, id)
end
if marker_ms ~= '' and not done then  -- else this call was on its way for long, and the end was confirmed meanwhile
  redis.call('SET', marker, state, 'PX', marker_ms)
end
return was_held

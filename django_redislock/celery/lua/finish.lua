-- Say what became of a message, for its copies, and end what it holds: its execution ends, or it ends without one, or
-- it is published again.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts, 5 processed marker of the message; to refuse the message,
--       behind these, the locks that a copy of it may hold; or the marker only
-- ARGV  1 verb (marker.lua), 2 expiry of the marker (ms), 3 id that holds the lock ('': nobody), 4 name, 5 fence ('':
--       any of this id), 6 id that keeps the lock ('': none), 7 its expiry (ms), 8 its record then; to publish the
--       message again: 9 its new version, 10 '1' when a copy of it may be about to say more; to refuse it: 9 its
--       version, 10 the claim, 11 'done' or 'ending', 12 what the ids of its executions begin with
-- Returns 1 when the lock was the caller's, in this call or in an earlier one whose reply was lost, else 0. To refuse
-- it: 1 when the caller may do so, 0 when it has been processed or published again, else -1 - (ms until another try).
if verb == 'keep' and was == 4 then  -- the message was revoked, so it does not come again
  keep_id = ''
end
local value, recalled = unmarked(id ~= '' and redis.call('GET', lock))
local was_held = 1
if recalled then  -- nothing makes its end later
  keep_id = ''
end
local of = fence == '' and id or id .. '\n' .. fence
-- The marker comes last: on a full server a script may write what takes memory only after it wrote what takes none, and
-- each lock stayed until its expiry.
if id ~= '' and not (value and is_of(value, of)) then
  -- A replica may lack the lock. It refuses this write, and so it is not believed.
  redis.call('PEXPIRE', receipts, RECEIPT_LIFE_MS)
  was_held = redis.call('ZSCORE', receipts, fence) and 1 or 0
elseif id ~= '' and keep_id ~= '' then
  redis.call('ZREM', receipts, 'id ' .. keep_id)
  keep_receipt(receipts, fence, fence)
  local now = now_us()
  local now_ms = whole(math.floor(now / 1000))
  redis.call('SET', lock, keep_id .. '\n' .. fence .. '\n' .. now_ms .. '\n' .. record, 'PX', keep_ms)
  index(held, name, now, tonumber(keep_ms))
elseif id ~= '' then
  redis.pcall('ZREM', held, name)
  if fence ~= '' then
    keep_receipt(receipts, fence, fence)
  end
  hand_over(lock, queue, fence ~= '' and id or '')  -- its own waiter needs no wake-up
end
if after then
  redis.call('SET', marker, after, 'PX', expire_ms)
end
return verb == 'refuse' and 1 or was_held

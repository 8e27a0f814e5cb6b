-- End an execution: release the lock, or leave it to something else for a while; mark the message as processed.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts, 5 mark of the message
-- ARGV  1 id, 2 name, 3 fence, 4 life of the mark (ms, '': none), 5 id that keeps the lock ('': none), 6 its life (ms),
--       7 its record then, 8 the mark: 'done', or 'ending' until the end is confirmed
-- Returns 1 when the lock was the caller's, in this call or in an earlier one whose reply was lost, else 0.
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[5], ARGV[8], 'PX', ARGV[4])
end
local mark = ARGV[4] == '' and redis.call('GET', KEYS[5])
local keep_id = not (mark and string.find(mark, '^done')) and ARGV[5] or ''  -- a message that was revoked does not come again
local id, fence = ARGV[1], ARGV[3]
local value = redis.call('GET', KEYS[1])
if not (value and is_of(value, id .. '\n' .. fence)) then
  return redis.call('ZSCORE', KEYS[4], fence) and 1 or 0
end
keep_receipt(KEYS[4], fence, fence)
if keep_id ~= '' then
  redis.call('ZREM', KEYS[4], 'id ' .. keep_id)
  local now = now_us()
  redis.call('SET', KEYS[1], keep_id .. '\n' .. fence .. '\n' .. whole(math.floor(now / 1000)) .. '\n' .. ARGV[7], 'PX', ARGV[6])
  index(KEYS[2], ARGV[2], now, tonumber(ARGV[6]))
else
  redis.pcall('ZREM', KEYS[2], ARGV[2])
  hand_over(KEYS[1], KEYS[3], id)
end
return 1

-- End an execution: release the lock, or leave it to something else for a while; mark the message as worked off.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 receipts, 5 mark of the message
-- ARGV  1 id, 2 name, 3 fence, 4 life of the mark (ms, '': none), 5 id that keeps the lock ('': none), 6 its life (ms),
--       7 its record
-- Returns 1 when the lock was the caller's, in this call or in an earlier one whose reply was lost, else 0.
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[5], 'ending', 'PX', ARGV[4])
end
local id, fence = ARGV[1], ARGV[3]
local value = redis.call('GET', KEYS[1])
if not (value and is_of(value, id .. '\n' .. fence)) then
  return redis.call('ZSCORE', KEYS[4], fence) and 1 or 0
end
keep_receipt(KEYS[4], fence, fence)
if ARGV[5] ~= '' then
  redis.call('ZREM', KEYS[4], 'id ' .. ARGV[5])
  local now = now_us()
  redis.call('SET', KEYS[1], ARGV[5] .. '\n' .. fence .. '\n' .. whole(math.floor(now / 1000)) .. '\n' .. ARGV[7], 'PX', ARGV[6])
  index(KEYS[2], ARGV[2], now, tonumber(ARGV[6]))
else
  redis.pcall('ZREM', KEYS[2], ARGV[2])
  hand_over(KEYS[1], KEYS[3], id)
end
return 1

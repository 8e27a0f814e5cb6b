-- Count the locks held now.
-- KEYS  indexes of held locks
-- Returns how many there are.
local now_ms, number = whole(math.floor(now_us() / 1000)), 0
for _, held in ipairs(KEYS) do
  number = number + redis.call('ZCOUNT', held, now_ms, '+inf')
end
return number

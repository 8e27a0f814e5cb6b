-- Count the locks held now.
-- KEYS  indexes of held locks
-- Returns the number of each index, in one string.
local now_ms, numbers = whole(math.floor(now_us() / 1000)), {}
for i, held in ipairs(KEYS) do
  numbers[i] = redis.call('ZCOUNT', held, now_ms, '+inf')
end
return table.concat(numbers, ' ')

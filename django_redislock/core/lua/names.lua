-- List the names of the locks held now.
-- KEYS  indexes of held locks
-- Returns the names.
local now_ms = math.floor(now_us() / 1000)
local names = {}
for _, held in ipairs(KEYS) do
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', held, now_ms, '+inf')) do
    names[#names + 1] = name
  end
end
return names

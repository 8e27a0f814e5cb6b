-- List the names of the locks held now.
-- KEYS  indexes of held locks
-- Returns the lengths of the names, and the names, each in one string: many small replies would take the reader long.
local now_ms = math.floor(now_us() / 1000)
local names, lengths = {}, {}
for _, held in ipairs(KEYS) do
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', held, now_ms, '+inf')) do
    names[#names + 1] = name
    lengths[#lengths + 1] = #name
  end
end
return {table.concat(lengths, ' '), table.concat(names)}

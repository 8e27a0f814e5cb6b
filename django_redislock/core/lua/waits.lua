-- Read the counts of about the last hour.
-- KEYS  indexes of held locks: one of each bucket
-- Returns the minute that it is, {name, ms waited, waits, gave up, ...}, {minute, ms waited, waits, ...} and {name, duplicates
-- prevented, recomputations avoided, ...}; all with repetitions.
local now = now_us()
local window = math.floor(now / WAITS_WINDOW_US)
local names, minutes, saved = {}, {}, {}
for _, held in ipairs(KEYS) do
  local tag = string.sub(held, 1, -5)
  for at = window - 6, window do
    local scores = redis.call('ZRANGE', tag .. 'waits:' .. at, 0, -1, 'WITHSCORES')
    if #scores > 0 then
      local fields, count = redis.call('HGETALL', tag .. 'waited:' .. at), {}
      for i = 1, #fields, 2 do
        count[fields[i]] = fields[i + 1]
        local minute = string.match(fields[i], '^ms:(%d+)$')
        if minute then
          minutes[#minutes + 1] = minute
          minutes[#minutes + 1] = fields[i + 1]
          minutes[#minutes + 1] = redis.call('HGET', tag .. 'waited:' .. at, 'waits:' .. minute) or '0'
        end
      end
      for i = 1, #scores, 2 do
        names[#names + 1] = scores[i]
        names[#names + 1] = scores[i + 1]
        names[#names + 1] = count['n' .. scores[i]] or '0'
        names[#names + 1] = count['g' .. scores[i]] or '0'
      end
    end
    for _, name in ipairs(redis.call('ZRANGE', tag .. 'saves:' .. at, 0, -1)) do
      local counts = redis.call('HMGET', tag .. 'saved:' .. at, 'd' .. name, 'a' .. name)
      saved[#saved + 1] = name
      saved[#saved + 1] = counts[1] or '0'
      saved[#saved + 1] = counts[2] or '0'
    end
  end
end
return {math.floor(now / 60000000), names, minutes, saved}

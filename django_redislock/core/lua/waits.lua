-- Read the counts of about the last hour.
-- KEYS  indexes of held locks: one of each bucket
-- ARGV  1 number of the index to go on with
-- Returns the current minute, {name, ms waited, waits, gave up, ...}, {minute, ms waited, waits, ...} and {name,
-- prevented duplicates, avoided computations, ...}, all with repetitions; and the number for the next call (0: there
-- is none): so many buckets and names at a time that the server is not kept busy for long.
local AT_ONCE, BUCKETS_AT_ONCE = 250, 64
local now = now_us()
local window = math.floor(now / WAITS_WINDOW_US)
local names, minutes, saved = {}, {}, {}
local bucket = tonumber(ARGV[1])
local last = math.min(#KEYS, bucket + BUCKETS_AT_ONCE - 1)
while bucket <= last and #names / 4 + #saved / 3 < AT_ONCE do
  local tag = string.sub(KEYS[bucket], 1, -5)
  bucket = bucket + 1
  for at = window - 6, window do
    local scores = redis.call('ZRANGE', tag .. 'waits:' .. at, 0, -1, 'WITHSCORES')
    if #scores > 0 then
      local fields, count = redis.call('HGETALL', tag .. 'waited:' .. at), {}
      for i = 1, #fields, 2 do
        count[fields[i]] = fields[i + 1]
      end
      for minute = at * 10, at * 10 + 9 do  -- of these ten
        if count['ms:' .. minute] then
          minutes[#minutes + 1] = minute
          minutes[#minutes + 1] = count['ms:' .. minute]
          minutes[#minutes + 1] = count['waits:' .. minute] or '0'
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
return {math.floor(now / 60000000), names, minutes, saved, bucket <= #KEYS and bucket or 0}

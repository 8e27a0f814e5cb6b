-- The counts of the contention page; put in front of the scripts that count. They take bounded space: for each bucket
-- and each ten minutes, the names with the longest waits, and the names that saved most. Errors are ignored.

-- Add to the score of a name, and to fields of the hash of the same ten minutes; remove the name with the lowest score.
local function count(held, now, scores, counts, name, score, fields)
  local tag, window = string.sub(held, 1, -5), math.floor(now / WAITS_WINDOW_US)  -- without 'held'
  scores, counts = tag .. scores .. window, tag .. counts .. window
  if tonumber(redis.pcall('ZINCRBY', scores, score, name)) == score then  -- its first time
    redis.pcall('PEXPIRE', scores, WAITS_LIFE_MS)
    if redis.pcall('ZCARD', scores) == WAITS_NAMES + 1 then
      local lowest = redis.pcall('ZRANGE', scores, 0, 1)
      local removed = lowest[1] == name and lowest[2] or lowest[1]
      if removed then
        redis.pcall('ZREM', scores, removed)
        redis.pcall('HDEL', counts, 'n' .. removed, 'g' .. removed, 'd' .. removed, 'a' .. removed)
      end
    end
  end
  for field, by in pairs(fields) do
    if redis.pcall('HINCRBY', counts, field, by) == by then
      redis.pcall('PEXPIRE', counts, WAITS_LIFE_MS)
    end
  end
end

-- Count waits that ended: their number, their length in all; `gave_up` of them got nothing. None without `held`.
local function count_waits(held, now, name, waited_ms, waits, gave_up)
  if not held or string.sub(name, 1, 17) == 'redislock-doctor:' then  -- a trial, for which nobody waited
    return
  end
  local minute = math.floor(now / 60000000)
  local fields = {['n' .. name] = waits, ['ms:' .. minute] = waited_ms, ['waits:' .. minute] = waits}
  if gave_up > 0 then
    fields['g' .. name] = gave_up
  end
  count(held, now, 'waits:', 'waited:', name, waited_ms, fields)
end

local function waited_ms(ticket, now)
  return math.max(0, math.floor((now - tonumber(ticket)) / 1000))
end

-- Count work that was not done twice: 'd' prevented duplicates of tasks, 'a' avoided computations of a value.
local function count_saved(held, now, name, what, number)
  count(held, now, 'saves:', 'saved:', name, number, {[what .. name] = number})
end

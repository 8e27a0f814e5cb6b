-- What is counted for the contention page; put in front of the scripts that count. They take up bounded space: of each of the
-- 64 buckets, for each ten minutes, the names that were waited for longest, and those that saved most. A failure is of no account.

-- Add to the score of a name, and to fields of the hash of the same ten minutes; the name with the lowest score leaves.
local function count(held, now, scores, counts, name, score, fields)
  local tag, window = string.sub(held, 1, -5), math.floor(now / WAITS_WINDOW_US)  -- without 'held'
  scores, counts = tag .. scores .. window, tag .. counts .. window
  if tonumber(redis.pcall('ZINCRBY', scores, score, name)) == score then  -- its first time
    redis.pcall('PEXPIRE', scores, WAITS_LIFE_MS)
    if redis.pcall('ZCARD', scores) == WAITS_NAMES + 1 then
      local least = redis.pcall('ZRANGE', scores, 0, 1)
      local leaves = least[1] == name and least[2] or least[1]
      if leaves then
        redis.pcall('ZREM', scores, leaves)
        redis.pcall('HDEL', counts, 'n' .. leaves, 'g' .. leaves, 'd' .. leaves, 'a' .. leaves)
      end
    end
  end
  for field, by in pairs(fields) do
    if redis.pcall('HINCRBY', counts, field, by) == by then
      redis.pcall('PEXPIRE', counts, WAITS_LIFE_MS)
    end
  end
end

-- Count waits that ended: of so many waiters, for so long in all; `gave_up` of them without what they waited for.
local function count_waits(held, now, name, waited_ms, waits, gave_up)
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

-- Count what was not done twice: 'd' duplicates of tasks, 'a' recomputations avoided.
local function count_saved(held, now, name, what, number)
  count(held, now, 'saves:', 'saved:', name, number, {[what .. name] = number})
end

-- How a lock is taken that nobody holds or waits for; put in front of the scripts that take one, after index.lua.

local DAY_MS, DAY_US = 86400000, 86400000000
local FENCE_LIFE_MS = DAY_MS  -- the clock may step back by less than this and fences still grow

-- Draw a fence larger than every earlier one, even when the server lost its data: then its clock has moved on. Return
-- the last fence, too; it is about the time (us) when a lock of the bucket was taken last.
local function next_fence(counter, now)
  local fence = whole(now)
  local last = redis.call('SET', counter, fence, 'PX', FENCE_LIFE_MS, 'GET')
  if last and tonumber(last) >= now then
    fence = whole(last + 1)
    redis.call('SET', counter, fence, 'PX', FENCE_LIFE_MS)
  end
  return fence, last
end

local function write(lock, id, fence, record, now, expire_ms)
  local value = id .. '\n' .. fence .. '\n' .. whole(math.floor(now / 1000)) .. '\n' .. record
  redis.call('SET', lock, value, 'PX', expire_ms)
end

-- Take a lock without holder and waiters by as few commands as possible, and return its fence; nil when it has either.
-- `found` is the number of keys that exist: the lock, its queue, and what else keeps it from being taken so, count twice
-- in it, and the index of held locks once. So 1 means that only the index exists.
local function take_unwanted(found, lock, held, counter, id, name, record, now, expire_ms)
  if found > 1 then
    return nil
  end
  enter(held, name, now, expire_ms)
  if found == 0 then
    redis.call('PEXPIRE', held, math.max(INDEX_LIFE_MS, expire_ms))
  end
  local fence, last = next_fence(counter, now)
  -- The first lock of the bucket today has already set the index's expiry to more than two weeks.
  if found == 1 and (expire_ms > DAY_MS or not last or math.floor(last / DAY_US) ~= math.floor(now / DAY_US)) then
    lengthen(held, expire_ms)
  end
  write(lock, id, fence, record, now, expire_ms)
  return fence
end

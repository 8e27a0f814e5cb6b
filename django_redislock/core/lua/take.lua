-- How a lock is taken; put in front of the scripts that do, after index.lua.
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

local function write(lock, id, fence, record, now, life_ms)
  redis.call('SET', lock, id .. '\n' .. fence .. '\n' .. whole(math.floor(now / 1000)) .. '\n' .. record, 'PX', life_ms)
end

-- Write the caller into a lock that is free or reserved for it (`value` is what the key holds), and return its fence and
-- whether it had been taken under that id before. That one is not shortened: its holder believes in its life.
local function take(lock, held, counter, value, id, name, record, now, life_ms)
  local fence = value and fence_of(value) or '0'
  index(held, name, now, life_ms)  -- first: should it fail, nothing is taken
  if fence ~= '0' then  -- and that reply was lost, or somebody else knows the id
    redis.call('PEXPIRE', lock, math.max(life_ms, redis.call('PTTL', lock)))
    return fence, true
  end
  fence = next_fence(counter, now)
  write(lock, id, fence, record, now, life_ms)
  return fence, false
end

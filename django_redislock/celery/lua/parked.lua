-- Parked messages: refused ones, by the time of their first conflict. Who releases a lock publishes the first of them.

-- Remove the first parked message for a free lock, two when another lock is free as well, because a message that was
-- woken may have been revoked; return them.
local function wake(locks, parked)
  local free = 0
  for _, value in ipairs(redis.call('MGET', unpack(locks))) do
    free = free + (value and 0 or 1)
  end
  local woken = {}
  for i = 1, math.min(free, 2) do
    local first = redis.call('ZPOPMIN', parked)[1]
    if first then
      woken[#woken + 1] = redis.call('HGET', parked .. ':messages', first)
      redis.call('HDEL', parked .. ':messages', first)
    end
  end
  return woken
end

-- Parked messages: refused ones, by the time of their first conflict. Who finds a lock free publishes the first of them.

-- Remove the first parked message if a lock is free, and return it; false when there is none, or no lock is free.
local function wake(locks, parked)
  for i = 1, #locks do
    if redis.call('EXISTS', locks[i]) == 0 then
      local first = redis.call('ZPOPMIN', parked)[1]
      local message = first and redis.call('HGET', parked .. ':messages', first)
      redis.call('HDEL', parked .. ':messages', first or '')
      return message
    end
  end
  return false
end

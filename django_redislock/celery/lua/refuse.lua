-- Refuse a message that finds its lock held, with the holder in the reply, by one command and before Lua makes the
-- functions for waiters. Put after quick.lua and counts.lua, and in front of acquire.lua, which does all other cases.
do
  local value = redis.call('GET', lock)
  local fence = value and fence_of(value)
  if fence and fence ~= '0' and not is_of(value, id) then
    if not receipts then  -- a message with a given id is published all the same
      count_saved(held, now, name, 'd', 1)
    end
    return {value, redis.call('PTTL', lock), redis.call('ZCARD', queue), math.floor(now / 1000)}
  end
end

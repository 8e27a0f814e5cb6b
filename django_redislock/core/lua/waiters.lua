-- How many wait; put in front of the scripts that tell.
local to_look_at = LOOKED_AT  -- in this call

-- Take those whose process is gone out of the queue, and return how many are left; of more than are looked at, an upper bound.
local function count_waiting(queue)
  local number = redis.call('ZCARD', queue)
  if number == 0 or to_look_at == 0 then
    return number
  end
  local gone = drop_gone(queue, to_look_at)
  to_look_at = math.max(0, to_look_at - number)
  return number - gone
end

-- The number of waiters; put in front of the scripts that return it.
local may_check = MAX_CHECKED  -- entries of queues in this call

-- Remove waiters from the queue whose process is gone, and return how many are left; if not all can be checked, an
-- upper bound.
local function count_waiting(queue)
  local number = redis.call('ZCARD', queue)
  if number == 0 or may_check == 0 then
    return number
  end
  local gone = drop_gone(queue, may_check)
  may_check = math.max(0, may_check - number)
  return number - gone
end

-- Which slot of several a caller takes; put in front of the scripts that look at slots, after turns.lua.

-- Return the slot that the caller may take, of the first `last`: the one that is reserved for it (`mine`), if there is
-- one, is tried first. If it may take none, return nil, and how many ms are left until another try makes sense (negative:
-- unknown). The other arguments are those of `may_take`.
local function find_slot(slots, last, values, mine, queue, id, channel, ticket, joins, now)
  local order, left = {mine}, -1
  for i = 1, last do
    if i ~= mine then
      order[#order + 1] = i
    end
  end
  for _, i in ipairs(order) do
    local free, ms = may_take(slots[i], queue, values[i], id, channel, ticket, joins, now)
    if free then
      return i
    end
    left = ms >= 0 and (left < 0 or ms < left) and ms or left
  end
  return nil, left
end

-- Free the other slots that are reserved for the caller, who took one, and give those that nobody released, as those of
-- a killed process, to the next waiters. Before, each poll brought one waiter to a slot: twenty slots took nine seconds.
local function leave_others(slots, limit, slot, queue, id, channel, now)
  local waits = redis.call('EXISTS', queue) == 1
  for i, value in ipairs(redis.call('MGET', unpack(slots, 1, limit))) do
    if i ~= slot and value and is_of(value, id) then
      hand_over(slots[i], queue, '')
    elseif i ~= slot and waits and (not value or fence_of(value) == '0') then
      may_take(slots[i], queue, value, '\n', channel, '', false, now)  -- that nobody takes
    end
  end
end

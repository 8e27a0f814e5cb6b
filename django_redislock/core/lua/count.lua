-- Count the locks held now, and look at some of them.
-- KEYS  indexes of held locks
-- ARGV  1 how many locks are looked at, at most: the server must not be kept busy for long
-- Returns how many are held; and of those looked at, for how long the oldest is held (ms), how many waiters they have,
-- how many are slots of semaphores, and what the limits of these semaphores are together. A leader is left out, because its lock is rightly held for days, and the others rightly wait for it.
local now_ms, left = math.floor(now_us() / 1000), tonumber(ARGV[1])
local number, oldest_ms, waiting, slots, limits = 0, 0, 0, 0, {}
for _, held in ipairs(KEYS) do
  local found = redis.call('ZCOUNT', held, whole(now_ms), '+inf')
  number = number + found
  if found > 0 and left > 0 then
    local tag = string.sub(held, 1, -5)  -- without 'held'
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', held, whole(now_ms), '+inf', 'LIMIT', 0, left)) do
      local value = redis.pcall('GET', tag .. 'lock:' .. name)
      local acquired = type(value) == 'string' and string.match(value, '^[^\n]*\n%d+\n(%d+)\n')
      if acquired and not string.find(value, '"kind":"leader"', 1, true) then
        oldest_ms = math.max(oldest_ms, now_ms - tonumber(acquired))
        local of_slot = string.match(name, '^(.*\255)%d+$')
        local queue = tag .. 'queue:' .. (of_slot or name)
        if not limits[queue] then  -- the slots of a semaphore share it
          waiting = waiting + count_waiting(queue)
        end
        if of_slot then
          slots = slots + 1
          limits[queue] = math.max(limits[queue] or 0, tonumber(string.match(value, '"limit":(%d+)') or 0))
        end
      end
      left = left - 1
    end
  end
end
local limit = 0
for _, of_one in pairs(limits) do
  limit = limit + of_one
end
return {number, whole(oldest_ms), waiting, slots, limit}

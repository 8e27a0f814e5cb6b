-- Read the values of many locks.
-- KEYS  for each lock: lock, queue
-- Returns the server's clock (ms); for each lock the length of its value (-1: free, -2: no lock wrote it), ms left and
-- the number of waiters, all in one string; and the values, in another one, because many small replies take long to
-- read.
local locks, numbers, values = {}, {}, {}
for i = 1, #KEYS, 2 do
  locks[#locks + 1] = KEYS[i]
end
local found = redis.call('MGET', unpack(locks))
for i = 1, #KEYS, 2 do
  local value = found[(i + 1) / 2]
  if not value then  -- MGET says the same of a key of another type
    value = redis.pcall('GET', KEYS[i])
  end
  if value and (type(value) == 'table' or not fence_of(value)) then
    numbers[#numbers + 1] = '-2 0 0'  -- and no error, because it must not hide the other locks
  else
    values[#values + 1] = value or ''
    numbers[#numbers + 1] = value and #value or -1
    numbers[#numbers + 1] = value and whole(redis.call('PTTL', KEYS[i])) or -2
    numbers[#numbers + 1] = value and count_waiting(KEYS[i + 1]) or 0
  end
end
return {math.floor(now_us() / 1000), table.concat(numbers, ' '), table.concat(values)}

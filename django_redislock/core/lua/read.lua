-- Read the values of many locks.
-- KEYS  for each lock: lock, queue
-- Returns the server's clock (ms); for each lock the length of its value (-1: free), ms left and the number of waiters,
-- all in one string; and the values, in another one, because many small replies take long to read.
local locks, numbers, values = {}, {}, {}
for i = 1, #KEYS, 2 do
  locks[#locks + 1] = KEYS[i]
end
local found = redis.call('MGET', unpack(locks))
for i = 1, #KEYS, 2 do
  local value = found[(i + 1) / 2]
  if not value then  -- MGET says the same of a key of another type
    value = redis.pcall('GET', KEYS[i])
    if type(value) == 'table' then
      return redis.error_reply(value.err .. ' Key: ' .. KEYS[i])
    end
  end
  local wrong = not_ours(KEYS[i], value)
  if wrong then
    return wrong
  end
  values[#values + 1] = value or ''
  numbers[#numbers + 1] = value and #value or -1
  numbers[#numbers + 1] = value and whole(redis.call('PTTL', KEYS[i])) or -2
  numbers[#numbers + 1] = value and count_waiting(KEYS[i + 1]) or 0
end
return {math.floor(now_us() / 1000), table.concat(numbers, ' '), table.concat(values)}

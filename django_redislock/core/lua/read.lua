-- Read what is known of many locks.
-- KEYS  for each lock: lock, queue
-- Returns the server's clock (ms), then for each lock: value (false: free), ms left, number of waiters.
local reply = {math.floor(now_us() / 1000)}
for i = 1, #KEYS, 2 do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) == 'table' then
    return redis.error_reply(value.err .. ' Key: ' .. KEYS[i])
  end
  reply[#reply + 1] = value
  reply[#reply + 1] = redis.call('PTTL', KEYS[i])
  reply[#reply + 1] = redis.call('ZCARD', KEYS[i + 1])
end
return reply

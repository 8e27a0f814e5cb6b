-- Set the expiry of many locks, each only if its acquisition still holds it; also repair the index of held locks.
-- KEYS  for each lock: lock, index of held locks
-- ARGV  1 '1' to set also an earlier expiry; for each lock: prefix of its value (id, or id \n fence), expire (ms), name
-- Returns for each lock 1 when renewed, 0 when that acquisition does not hold it, -1 when it was recalled (reset.lua).
local shorten, now, renewed = ARGV[1] == '1', now_us(), {}
for i = 1, #KEYS / 2 do
  local lock, held = KEYS[2 * i - 1], KEYS[2 * i]
  local value_prefix, expire_ms, name = ARGV[3 * i - 1], tonumber(ARGV[3 * i]), ARGV[3 * i + 1]
  local value = redis.pcall('GET', lock)  -- a key of another type must not prevent the other locks' renewal
  renewed[i] = 0
  if type(value) == 'string' and is_of(value, value_prefix) and fence_of(value) ~= '0' then
    expire_ms = set_end(lock, value, expire_ms, shorten)
    pcall(index, held, name, now, expire_ms)
    renewed[i] = 1
  elseif type(value) == 'string' and is_of(unmarked(value), value_prefix) then
    renewed[i] = -1
  else  -- a replica may lack the lock; it refuses writes, and is not believed
    local reply = redis.pcall('ZREM', held, '')
    if type(reply) == 'table' and string.find(reply.err, 'READONLY', 1, true) then
      return reply
    end
  end
end
return renewed

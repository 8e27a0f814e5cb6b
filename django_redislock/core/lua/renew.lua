-- Give many locks a new life, each only if its id still holds it; mends the index on the way.
-- KEYS  for each lock: lock, index of held locks
-- ARGV  for each lock: id, expire (ms), name
-- Returns for each lock 1 when renewed, 0 when it is not that id's.
local now = now_us()
local renewed = {}
for i = 1, #KEYS / 2 do
  local lock, held = KEYS[2 * i - 1], KEYS[2 * i]
  local id, life_ms, name = ARGV[3 * i - 2], tonumber(ARGV[3 * i - 1]), ARGV[3 * i]
  local value = redis.call('GET', lock)
  renewed[i] = 0
  if value and is_of(value, id) and fence_of(value) ~= '0' then
    redis.call('PEXPIRE', lock, life_ms)
    index(held, name, now, life_ms)
    renewed[i] = 1
  end
end
return renewed

-- Give many locks a new life, each only if its acquisition still holds it; mends the index on the way.
-- KEYS  for each lock: lock, index of held locks
-- ARGV  1 '1' to shorten lives, too; for each lock: id, or id \n fence; expire (ms); name
-- Returns for each lock 1 when renewed, 0 when it is not that acquisition's.
local now = now_us()
local renewed = {}
for i = 1, #KEYS / 2 do
  local lock, held = KEYS[2 * i - 1], KEYS[2 * i]
  local holder, life_ms, name = ARGV[3 * i - 1], tonumber(ARGV[3 * i]), ARGV[3 * i + 1]
  local value = redis.pcall('GET', lock)  -- what something else wrote spoils no other lock's renewal
  renewed[i] = 0
  if type(value) == 'string' and is_of(value, holder) and fence_of(value) ~= '0' then
    if ARGV[1] ~= '1' then  -- a renewal that was overtaken by an extension must not undo it
      life_ms = math.max(life_ms, redis.call('PTTL', lock))
    end
    redis.call('PEXPIRE', lock, life_ms)
    pcall(index, held, name, now, life_ms)
    renewed[i] = 1
  end
end
return renewed

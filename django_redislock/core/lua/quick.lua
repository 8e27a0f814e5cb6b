-- Take a lock without holder and waiters by as few commands as possible, before Lua makes the functions for all other
-- cases. Put after take.lua and in front of acquire.lua, with the KEYS and ARGV of the latter.
local now = now_us()
if ARGV[7] == '' and not KEYS[5] then
  -- The lock and its queue count twice, so 1 means that only the index exists.
  local there = redis.call('EXISTS', KEYS[1], KEYS[1], KEYS[4], KEYS[4], KEYS[2])
  if there < 2 then
    local life_ms = tonumber(ARGV[2])
    enter(KEYS[2], ARGV[3], now, life_ms)
    if there == 0 then
      redis.call('PEXPIRE', KEYS[2], math.max(INDEX_LIFE_MS, life_ms))
    end
    local fence, last = next_fence(KEYS[3], now)
    -- The first lock of the bucket today has already made the index live for two weeks.
    if there == 1 and (life_ms > DAY_MS or not last or math.floor(last / DAY_US) ~= math.floor(now / DAY_US)) then
      lengthen(KEYS[2], life_ms)
    end
    write(KEYS[1], ARGV[1], fence, ARGV[4], now, life_ms)
    return tonumber(fence)
  end
end

-- A lock that nobody holds or waits for: taken by as few commands as possible, before the functions are made that all other
-- cases need. Put in front of acquire.lua, whose KEYS and ARGV these are, after take.lua.
local now = now_us()
if ARGV[7] == '' and not KEYS[5] then
  -- The lock and its queue count twice, so that 1 is an index that there is.
  local there = redis.call('EXISTS', KEYS[1], KEYS[1], KEYS[4], KEYS[4], KEYS[2])
  if there < 2 then
    local life_ms = tonumber(ARGV[2])
    enter(KEYS[2], ARGV[3], now, life_ms)
    if there == 0 then
      redis.call('PEXPIRE', KEYS[2], math.max(INDEX_LIFE_MS, life_ms))
    end
    local fence, last = next_fence(KEYS[3], now)
    -- Who was the first of its bucket today saw to it that the index lives for two weeks.
    if there == 1 and (life_ms > DAY_MS or not last or math.floor(last / DAY_US) ~= math.floor(now / DAY_US)) then
      lengthen(KEYS[2], life_ms)
    end
    write(KEYS[1], ARGV[1], fence, ARGV[4], now, life_ms)
    return tonumber(fence)
  end
end

-- The index of held locks; put in front of the scripts that write into it.
-- Make the index live as long as this lock. Its life is never made shorter, because other locks may live longer.
local function lengthen(held, life_ms)
  if redis.call('PTTL', held) < math.max(INDEX_LIFE_MS / 2, life_ms) then
    redis.call('PEXPIRE', held, math.max(INDEX_LIFE_MS, life_ms))
  end
end

local function enter(held, name, now, life_ms)
  local now_ms = math.floor(now / 1000)
  redis.call('ZADD', held, now_ms + life_ms, name)
  if now % 8 == 0 then  -- sometimes remove locks that ended without a release
    local ended = redis.call('ZRANGEBYSCORE', held, '-inf', '(' .. now_ms, 'LIMIT', 0, 100)
    if #ended > 0 then
      redis.call('ZREM', held, unpack(ended))
    end
  end
end

local function index(held, name, now, life_ms)
  enter(held, name, now, life_ms)
  lengthen(held, life_ms)
end

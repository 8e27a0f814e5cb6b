-- The index of held locks: a sorted set of their names by expiry (ms); put in front of the scripts that write it.

local INDEX_LIFE_MS = 30 * 86400000

-- Let the index expire no earlier than this lock, nor earlier than before, because other locks may expire later.
local function lengthen(held, expire_ms)
  if redis.call('PTTL', held) < math.max(INDEX_LIFE_MS / 2, expire_ms) then
    redis.call('PEXPIRE', held, math.max(INDEX_LIFE_MS, expire_ms))
  end
end

local function enter(held, name, now, expire_ms)
  local now_ms = math.floor(now / 1000)
  redis.call('ZADD', held, now_ms + expire_ms, name)
  if now % 8 == 0 then  -- sometimes remove locks that ended without a release
    local ended = redis.call('ZRANGEBYSCORE', held, '-inf', '(' .. now_ms, 'LIMIT', 0, 100)
    if #ended > 0 then
      redis.call('ZREM', held, unpack(ended))
    end
  end
end

local function index(held, name, now, expire_ms)
  enter(held, name, now, expire_ms)
  lengthen(held, expire_ms)
end

-- The index of held locks; put in front of the scripts that write into it.
local function index(held, name, now, life_ms)
  local now_ms = math.floor(now / 1000)
  redis.call('ZADD', held, now_ms + life_ms, name)
  if redis.call('PTTL', held) < math.max(INDEX_LIFE_MS / 2, life_ms) then  -- never cut short for those that live longer
    redis.call('PEXPIRE', held, math.max(INDEX_LIFE_MS, life_ms))
  end
  if now % 8 == 0 then  -- now and then, what ended without a release
    local ended = redis.call('ZRANGEBYSCORE', held, '-inf', '(' .. now_ms, 'LIMIT', 0, 100)
    if #ended > 0 then
      redis.call('ZREM', held, unpack(ended))
    end
  end
end

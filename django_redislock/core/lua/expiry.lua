-- The expiry of a held lock; put in front of the scripts that set it anew.

-- Set the end of a held lock, and return its expiry (ms). A call that arrives late must not undo a later one that asked
-- for a longer expiry, so the end is not made earlier, unless the acquirer shortens. But it is never later than the
-- longest expiry that a holder asked for, which is in the record: after a step of the server's clock by an hour back,
-- the key of a killed holder would else stay for an hour.
local function set_end(lock, value, expire_ms, shorten)
  local from, to, longest = string.find(value, ',"expire":([%d.e+]+)')
  local longest_ms = longest and math.ceil((tonumber(longest) or math.huge) * 1000) or math.huge
  if from and (shorten or expire_ms > longest_ms) then
    local expire = string.format(',"expire":%.3f', expire_ms / 1000)
    redis.call('PEXPIRE', lock, expire_ms)  -- first: a server that is full lets only a script go on that has written
    redis.call('SET', lock, string.sub(value, 1, from - 1) .. expire .. string.sub(value, to + 1), 'PX', expire_ms)
    return expire_ms
  end
  if not shorten then
    expire_ms = math.min(math.max(expire_ms, redis.call('PTTL', lock)), longest_ms)
  end
  redis.call('PEXPIRE', lock, expire_ms)
  return expire_ms
end

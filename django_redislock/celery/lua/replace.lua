-- Give a message that waits the arguments of its duplicate; publish.lua describes the KEYS and ARGV. Put after
-- quick_publish.lua and receipts.lua, and in front of publish.lua.
local OWN_NEWEST = ',"newest":"[^"]*"}$'  -- in the value of the lock, so that they live as long as it does

if verb == 'replace' then
  receipts = KEYS[2]
  if redis.call('ZSCORE', receipts, receipt) then
    return 1
  end
  local value = redis.call('GET', lock)
  -- A replica may lack the lock. It refuses this write, and is not believed. On a full server, what takes memory may be
  -- written only after it.
  redis.call('PEXPIRE', receipts, RECEIPT_LIFE_MS)
  if not (value and is_of(value, id .. '\n' .. fence)) then
    return 0
  end
  keep_receipt(receipts, receipt, whole(now_us()))  -- by their time, because all replacements are under one fence
  local before = string.gsub(value, OWN_NEWEST, '}')
  redis.call('SET', lock, string.sub(before, 1, -2) .. ',"newest":"' .. newest .. '"}', 'KEEPTTL')
  return 1
end

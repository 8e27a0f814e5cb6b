-- Name the KEYS and ARGV of settle.lua, store the value, and end the lease. If nobody waits for the value, that is all, and
-- Lua makes no functions for the waiters. Put after lib.lua and in front of counts.lua.
local PAUSE_MS, LONGEST_PAUSE_MS = 1000, 60000  -- between two tries to replace a stale value; each failure doubles it
local CLOCK_MS = 20   -- two calls may read the expiry of the same key with this difference
local FETCH_MS = 10000  -- expiry of a value that is not stored: within that time the waiters can fetch it
local lock, index, queue, value_key, witness, era, counts, failures, upload = unpack(KEYS, 1, 9)
local fence, name, expire_ms, old_digest, old_ends, data, leader = unpack(ARGV)
local failed = expire_ms == '!'
local holder, recalled = unmarked(redis.call('GET', lock))
local leased = holder and fence_of(holder) == fence and (leader == '1' or not recalled)
if not leased then
  local stands = false
  if leader == '1' and expire_ms ~= '0' and not failed then
    local kept, number = redis.call('MGET', witness, era), tonumber(fence)
    stands = kept[1] and kept[2] and tonumber(kept[1]) <= number and tonumber(kept[2]) <= number
  end
  if not stands then
    if upload then
      redis.call('UNLINK', upload)
    end
    return old_digest == '' and not failed and redis.call('EXISTS', value_key) == 1 and 0 or -1
  end
end

local kept = not upload and expire_ms ~= '0' and not failed and not recalled
local expiry = expire_ms == '' and {} or {'PX', expire_ms}
local stored
if kept and old_digest == '' then
  stored = redis.call('SET', value_key, data, 'NX', unpack(expiry)) ~= false
else
  stored = redis.call('EXISTS', value_key) == 0
  if not stored and old_digest ~= '' and redis.sha1hex(redis.call('GET', value_key)) == old_digest then
    -- The same bytes may have been set, or touched, with another expiry meanwhile.
    stored = old_ends == '' or math.abs(ends_at(value_key) - old_ends) <= CLOCK_MS
  end
  if kept and stored then
    redis.call('SET', value_key, data, unpack(expiry))
  end
end
stored = stored and not recalled
if upload and not (stored and redis.call('EXISTS', upload) == 1) then
  redis.call('UNLINK', upload)
  stored = false
elseif upload and expire_ms == '0' then
  redis.call('PEXPIRE', upload, redis.call('ZCARD', queue) == 0 and 0 or FETCH_MS)
elseif upload then
  redis.call('RENAME', upload, value_key)
  if expire_ms == '' then
    redis.call('PERSIST', value_key)
  else
    redis.call('PEXPIRE', value_key, expire_ms)
  end
end

if old_digest ~= '' and failed then
  local count = tonumber(string.match(redis.call('GET', failures) or '', '^%d+') or 0) + 1
  local pause = math.min(LONGEST_PAUSE_MS, PAUSE_MS * 2 ^ (count - 1))
  local again = whole(math.floor(now_us() / 1000) + pause)
  redis.call('SET', failures, count .. ' ' .. again, 'PX', pause + LONGEST_PAUSE_MS)
elseif failures and stored and not failed then  -- also of a value that was deleted after they failed to replace it
  redis.call('DEL', failures)
end

redis.call('DEL', lock, witness)
redis.call('ZREM', index, name)
if redis.call('EXISTS', queue) == 0 then
  return stored and (leased and 1 or 2) or recalled and -1 or 0
end

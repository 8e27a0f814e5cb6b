-- Ask for a value: it is stored, or the caller computes it, or another caller computes it.
-- KEYS  lock, index of held locks, fence counter, queue, value, witness of the value, era of its bucket, note that this
--       attempt is given up (undone.lua); only if has_old is '1': failures to replace the stale value
-- ARGV  id, expire (ms), name, record, channel of the waiter ('': none), join ('1': join the queue), SHA-1 of the
--       stale value ('': none), has_old ('1': the caller can return the stale value, else '0'), due (ms before its
--       expiry at which the stale value is replaced, '': the SHA-1 alone decides)
-- Returns one of
--   {'value', value, owns}   owns: 1 if the caller holds the lock and has to release it, else 0
--   {'large', '', owns}      there is a value, which the caller fetches by other commands
--   {'compute', fence, expiry of the stale value (ms, '': there is none)}
--   {'wait', fence of the lease that another caller holds, ms until another call makes sense (negative: unknown),
--       length of the queue (missing: the caller did not join it)}
--   {'paused'}               a computation failed a moment ago, and the caller can return the stale value
--
-- The witness holds the fence of a lease. While it exists, the value was not invalidated since that lease was taken: an
-- invalidation deletes the witness. An invalidation of a pattern of keys deletes the era of the bucket instead, which
-- holds a fence, too. A lease may end early, because the server evicted it or the computation took too long. Its value
-- is still stored if both keys exist and neither fence is larger than that of the lease. If the server evicted the
-- witness, the value is not stored.
-- The KEYS and ARGV are named in quick_lease.lua.
local LARGE = 524288  -- bytes; Lua would make one more copy of the value
local holder = redis.call('GET', lock)
local wrong = not_ours(lock, holder)
if wrong then
  return wrong
end
local mine = holder and is_of(holder, id)
local left, overdue
if holder and not mine then
  local ends = string.match(holder, '^[^\n]*\n0\n(%d+)\n')
  if ends then
    left, overdue = until_end(ends, now)
  else
    left = redis.call('PTTL', lock)
  end
end

local function leave()
  if channel ~= '' then
    redis.call('ZREM', queue, channel .. '\n' .. id)
  end
end

local busy = holder and not mine and not overdue
-- The caller has the stale value and asks for the lease only: the value is not read, because copy and hash take time.
if busy and has_old == '1' and join ~= '1' then
  leave()
  return {'wait', fence_of(holder), left}
end

-- 1: the era, 2: the value, 3: both; 4 more if the attempt is given up
local there = redis.call('EXISTS', era, value_key, value_key, undone, undone, undone, undone)
if there > 3 then
  return redis.error_reply('ERR The attempt was given up before this call arrived.')
end
-- Before the value is read, because each process asks once a second meanwhile: 24 of them cost 912 ms a second with a
-- value of 20 MB. The caller returns the stale value, which it has just read.
if has_old == '1' and there > 1 and not mine then
  local again = string.match(redis.call('GET', failures) or '', ' (%d+)$')
  if again and tonumber(again) > now / 1000 then
    leave()
    return {'paused'}
  end
end

local length = there > 1 and redis.call('STRLEN', value_key) or 0
local large = length > LARGE and old_digest == ''
local value = length > 0 and not large and redis.call('GET', value_key)
local old = value and old_digest ~= ''
if old and tonumber(due or '') then
  -- A computation may return the same bytes again. Callers that read a replica, or processed an old message, replaced
  -- them each time.
  local ttl = redis.call('PTTL', value_key)
  old = ttl >= 0 and ttl <= tonumber(due)
end
if large or value and not (old and redis.sha1hex(value) == old_digest) then
  leave()
  return {large and 'large' or 'value', large and '' or value, mine and 1 or 0}
end

-- The queue has no order here: the caller that computes does it for all waiters.
if not busy then
  leave()
  local fence = take(lock, held, counter, holder, id, name, record, now, expire_ms)
  if there % 2 == 0 then
    redis.call('SET', era, fence, 'PX', WITNESS_LIFE_MS)
  end
  redis.call('SET', witness, fence, 'NX', 'PX', WITNESS_LIFE_MS)
  return {'compute', fence, value and whole(ends_at(value_key)) or ''}
end

if join == '1' then
  redis.call('ZADD', queue, 'NX', whole(now), channel .. '\n' .. id)
  redis.call('PEXPIRE', queue, QUEUE_LIFE_MS)
  return {'wait', fence_of(holder), left, redis.call('ZCARD', queue)}
end
leave()
return {'wait', fence_of(holder), left}

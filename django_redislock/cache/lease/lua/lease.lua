-- Ask for a value: it is there, or the caller has to compute it, or another caller computes it.
-- KEYS  1 lock, 2 index of held locks, 3 fence counter, 4 queue, 5 the value, 6 the witness of the value, 7 the era of its bucket;
--       only if ARGV[8] is '1' or ARGV[9] is given: 8 the waits of computations for each other, 9 the failures to
--       replace the value
-- ARGV  1 id, 2 expire (ms), 3 name, 4 record, 5 channel of the waiter ('': none), 6 '1' to join the queue,
--       7 SHA-1 of a value that is too old ('': none), 8 '1' if the caller can do with that one, else '0', 9... names of what the caller
--       computes meanwhile
-- Returns {'value', value, 1 if the caller has the lock, to give it back}, {'large', '', same} when a value is there that is better
-- fetched by a GET, {'compute', fence, when the too old value ends (ms, '': there is none)}, {'wait', fence of who computes, ms until
-- another try makes sense (negative: unknown)}, {'cycle'} when who computes waits for the caller, or {'paused'} when a computation
-- failed a moment ago and the caller can do with the old value.
--
-- The witness holds the fence of a lease. While it exists, the value was not invalidated since that lease was taken: an
-- invalidation deletes the witness. An invalidation of a pattern of keys deletes the era of the bucket instead, which
-- holds a fence, too. A lease may end early, because the server evicted it or the computation took too long. Its value
-- is still stored if both keys exist and neither fence is larger than that of the lease. If the server evicted the
-- witness, the value is not stored.
local LARGE = 524288  -- bytes; Lua would make one copy more
local WITNESS_LIFE_MS = 86400000  -- longer than most values live, because some servers evict the shortest life first
local id, life_ms, name, channel = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[5]
local now = now_us()
local lock = redis.call('GET', KEYS[1])
local wrong = not_ours(KEYS[1], lock)
if wrong then
  return wrong
end
local mine = lock and is_of(lock, id)
local left, overdue
if lock and not mine then
  local ends = string.match(lock, '^[^\n]*\n0\n(%d+)\n')
  if ends then
    left, overdue = until_end(ends, now)
  else
    left = redis.call('PTTL', KEYS[1])
  end
end

local function leave()
  if channel ~= '' then
    redis.call('ZREM', KEYS[4], channel .. '\n' .. id)
  end
end

local held = lock and not mine and not overdue
-- The caller has the old value and asks only for the lease: the value is not read then, because a copy and a hash take
-- time.
if held and ARGV[8] == '1' and ARGV[6] ~= '1' and #ARGV == 8 then
  leave()
  return {'wait', fence_of(lock), left}
end

local there = redis.call('EXISTS', KEYS[7], KEYS[5], KEYS[5])  -- 1: the era, 2: the value, 3: both
local length = there > 1 and redis.call('STRLEN', KEYS[5]) or 0
local large = length > LARGE and ARGV[7] == ''
local value = length > 0 and not large and redis.call('GET', KEYS[5])
if large or value and (ARGV[7] == '' or redis.sha1hex(value) ~= ARGV[7]) then
  leave()
  return {large and 'large' or 'value', large and '' or value, mine and 1 or 0}
end

if ARGV[8] == '1' and value and not mine then
  local again = string.match(redis.call('GET', KEYS[9]) or '', ' (%d+)$')
  if again and tonumber(again) > now / 1000 then
    leave()
    return {'paused'}
  end
end

-- There is no turn to keep: whoever computes does it for all who wait.
if not held then
  leave()
  local fence = take(KEYS[1], KEYS[2], KEYS[3], lock, id, name, ARGV[4], now, life_ms)
  if there % 2 == 0 then
    redis.call('SET', KEYS[7], fence, 'PX', WITNESS_LIFE_MS)
  end
  redis.call('SET', KEYS[6], fence, 'NX', 'PX', WITNESS_LIFE_MS)
  return {'compute', fence, value and whole(ends_at(KEYS[5])) or ''}
end

if #ARGV > 8 then
  local computing = {}
  for i = 9, #ARGV do
    computing[ARGV[i]] = true
  end
  local at, steps = name, 0
  while at and not computing[at] and steps < 100 do
    at, steps = redis.call('HGET', KEYS[8], at), steps + 1
  end
  if at and computing[at] then
    leave()
    return {'cycle'}
  end
  for i = 9, #ARGV do
    redis.call('HSET', KEYS[8], ARGV[i], name)
  end
  redis.call('PEXPIRE', KEYS[8], QUEUE_LIFE_MS)
end

if ARGV[6] == '1' then
  redis.call('ZADD', KEYS[4], 'NX', whole(now), channel .. '\n' .. id)
  redis.call('PEXPIRE', KEYS[4], QUEUE_LIFE_MS)
else
  leave()
end
return {'wait', fence_of(lock), left}

-- Count a duplicate of a task that was not published, or did not run; and tell who holds its lock.
-- KEYS  1 lock, 2 queue, 3 counts of the bucket
-- ARGV  1 name, 2 '1' to count also when nobody holds the lock any more
-- Returns {value of the lock key, ms left, waiters, now (ms)}, or nil when nobody holds the lock.
local lock, queue, counts = unpack(KEYS)
local name, always = unpack(ARGV)
local value, now = redis.call('GET', lock), now_us()
local wrong = not_ours(lock, value)
if wrong then
  return wrong
end
local is_held = value and fence_of(value) ~= '0'
if is_held or always == '1' then
  pcall(add, counts, now, name, 0, 0, 0, 1, 0)
end
return is_held and {value, redis.call('PTTL', lock), redis.call('ZCARD', queue), math.floor(now / 1000)}

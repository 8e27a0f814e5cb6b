-- Store what was computed, unless something newer is there; end the lease, and wake everybody who waits for the value.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 the value, 5 which computation waits for which
-- ARGV  1 fence of the lease, 2 name, 3 life of the value (ms, '': for ever), 4 SHA-1 of the value that it replaces
--       ('': none), 5 the value
-- Returns 1 when stored, 0 when there is a newer value, -1 when the lease is not held (any more): then nothing is done.
local SMALL = 32768  -- bytes; a larger value is fetched by those who want it instead of being sent to each
local lock = redis.call('GET', KEYS[1])
if not lock or fence_of(lock) ~= ARGV[1] then
  return -1
end

local current = redis.call('GET', KEYS[4])
local stored = not current or (ARGV[4] ~= '' and redis.sha1hex(current) == ARGV[4])
if stored and ARGV[3] ~= '' then
  redis.call('SET', KEYS[4], ARGV[5], 'PX', ARGV[3])
elseif stored then
  redis.call('SET', KEYS[4], ARGV[5])
end

local word = stored and #ARGV[5] <= SMALL and '\n' .. ARGV[5] or ''
for _, entry in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  local channel, id = string.match(entry, '^(.-)\n(.*)$')
  redis.pcall('PUBLISH', channel, id .. word)
end
redis.call('DEL', KEYS[1], KEYS[3])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('HDEL', KEYS[5], ARGV[2])
return stored and 1 or 0

-- Store what was computed, unless something newer is there; end the lease, and wake everybody who waits for the value.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 the value, 5 which computation waits for which,
--       6 how often the old value could not be replaced, 7 where the value is put ready, when it is too large to be copied by Lua
-- ARGV  1 fence of the lease, 2 name, 3 life of the value (ms, '': for ever, '0': it is only told to those who wait,
--       '!': as well, and it is not a value but how its computation failed),
--       4 SHA-1 of the value that it replaces ('': none), 5 when that one ends (ms, '': not known), 6 the value; when it is put
--       ready: its length, its SHA-1, and, if it is only told, KEYS[7] again
-- Those who wait are sent  id \n = value ,  id \n ! failure , or  id \n # length SHA-1 [key]  to fetch it in pieces, or the id alone to ask again.
-- Returns 1 when stored or told, 0 when there is a newer value, -1 when the lease is not held (any more): then nothing is done.
local PAUSE_MS, LONGEST_PAUSE_MS = 1000, 60000  -- between two tries to replace an old value; it doubles with each failure
local CLOCK_MS = 20   -- what was read of a key's end may differ by this much between two calls
local FETCH_MS = 10000  -- so long is a value that is only told there for those who fetch it
local SMALL = 32768  -- bytes; a larger value is fetched by those who want it instead of being sent to each
local failed = ARGV[3] == '!'
local lock = redis.call('GET', KEYS[1])
if not lock or fence_of(lock) ~= ARGV[1] then
  if KEYS[7] then
    redis.call('UNLINK', KEYS[7])
  end
  return -1
end

local current = redis.call('GET', KEYS[4])
local stored = not current
if current and ARGV[4] ~= '' and redis.sha1hex(current) == ARGV[4] then
  -- The same bytes with another end were set, or touched, meanwhile.
  stored = ARGV[5] == '' or math.abs(ends_at(KEYS[4], now_us()) - ARGV[5]) <= CLOCK_MS
end
if KEYS[7] and not (stored and redis.call('EXISTS', KEYS[7]) == 1) then
  redis.call('UNLINK', KEYS[7])
  stored = false
elseif KEYS[7] and ARGV[3] == '0' then
  redis.call('PEXPIRE', KEYS[7], redis.call('ZCARD', KEYS[3]) == 0 and 0 or FETCH_MS)
elseif KEYS[7] then
  redis.call('RENAME', KEYS[7], KEYS[4])
  if ARGV[3] == '' then
    redis.call('PERSIST', KEYS[4])
  else
    redis.call('PEXPIRE', KEYS[4], ARGV[3])
  end
elseif stored and ARGV[3] == '' then
  redis.call('SET', KEYS[4], ARGV[6])
elseif stored and ARGV[3] ~= '0' and not failed then
  redis.call('SET', KEYS[4], ARGV[6], 'PX', ARGV[3])
end

if ARGV[4] ~= '' and failed then
  local failures = tonumber(string.match(redis.call('GET', KEYS[6]) or '', '^%d+') or 0) + 1
  local pause = math.min(LONGEST_PAUSE_MS, PAUSE_MS * 2 ^ (failures - 1))
  local again = whole(math.floor(now_us() / 1000) + pause)
  redis.call('SET', KEYS[6], failures .. ' ' .. again, 'PX', pause + LONGEST_PAUSE_MS)
elseif ARGV[4] ~= '' and stored then
  redis.call('DEL', KEYS[6])
end

local word = stored and #ARGV[6] <= SMALL and (failed and '\n!' or KEYS[7] and '\n#' or '\n=') .. ARGV[6] or ''
local entries = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
local now, ms = now_us(), 0
for i = 1, #entries, 2 do
  local channel, id = string.match(entries[i], '^(.-)\n(.*)$')
  redis.pcall('PUBLISH', channel, id .. word)
  ms = ms + waited_ms(entries[i + 1], now)
end
if #entries > 0 and stored then
  count_waits(KEYS[2], now, ARGV[2], ms, #entries / 2, failed and #entries / 2 or 0)
  if not failed then
    count_saved(KEYS[2], now, ARGV[2], 'a', #entries / 2)
  end
end
redis.call('DEL', KEYS[1], KEYS[3])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('HDEL', KEYS[5], ARGV[2])
return stored and 1 or 0

-- Store the computed value, unless there is a newer value; end the lease, and wake all waiters for the value.
-- KEYS  1 lock, 2 index of held locks, 3 queue, 4 the value, 5 the witness of the value, 6 the era of its bucket (see lease.lua);
--       only if the computation has waited for another one, replaces an old value, or has put the value ready: 7 the
--       waits of computations for each other, 8 the failures to replace the old value, and 9 the key where the value is
--       put ready, if it is too large for a copy by Lua
-- ARGV  1 fence of the lease, 2 name, 3 life of the value (ms, '': for ever, '0': it is only told to those who wait,
--       '!': as well, and it is not a value but how its computation failed),
--       4 SHA-1 of the value that it replaces ('': none), 5 when that one ends (ms, '': not known), 6 the value; when it is put
--       ready: its length, its SHA-1, and, if it is only told, KEYS[9] again; 7 '1' if the lease is the caller's own, else '0'
-- Those who wait are sent  id \n = value ,  id \n ! failure , or  id \n # length SHA-1 [key]  to fetch it in pieces, or the id alone to ask again.
-- Returns 1 when the value was stored or sent to the waiters, 2 when it was stored although the lease had ended,
-- because the witness exists, 0 when there is a newer value, and -1 when the value was invalidated, or may have been:
-- then nothing is stored.
local PAUSE_MS, LONGEST_PAUSE_MS = 1000, 60000  -- between two tries to replace an old value; it doubles with each failure
local CLOCK_MS = 20   -- the end of a key may be read with this difference in two calls
local FETCH_MS = 10000  -- life of a value that is not stored: so long the waiters can fetch it
local SMALL = 32768  -- bytes; a larger value is not sent, but fetched by each waiter
local failed = ARGV[3] == '!'
local lock, ready = redis.call('GET', KEYS[1]), KEYS[9]
local leased = lock and fence_of(lock) == ARGV[1]
if not leased then
  local stands = false
  if ARGV[7] == '1' and ARGV[3] ~= '0' and not failed then
    local kept, fence = redis.call('MGET', KEYS[5], KEYS[6]), tonumber(ARGV[1])
    stands = kept[1] and kept[2] and tonumber(kept[1]) <= fence and tonumber(kept[2]) <= fence
  end
  if not stands then
    if ready then
      redis.call('UNLINK', ready)
    end
    return ARGV[4] == '' and not failed and redis.call('EXISTS', KEYS[4]) == 1 and 0 or -1
  end
end

local kept = not ready and ARGV[3] ~= '0' and not failed
local life = ARGV[3] == '' and {} or {'PX', ARGV[3]}
local stored
if kept and ARGV[4] == '' then
  stored = redis.call('SET', KEYS[4], ARGV[6], 'NX', unpack(life)) ~= false
else
  stored = redis.call('EXISTS', KEYS[4]) == 0
  if not stored and ARGV[4] ~= '' and redis.sha1hex(redis.call('GET', KEYS[4])) == ARGV[4] then
    -- The same bytes with another end were set, or touched, meanwhile.
    stored = ARGV[5] == '' or math.abs(ends_at(KEYS[4]) - ARGV[5]) <= CLOCK_MS
  end
  if kept and stored then
    redis.call('SET', KEYS[4], ARGV[6], unpack(life))
  end
end
if ready and not (stored and redis.call('EXISTS', ready) == 1) then
  redis.call('UNLINK', ready)
  stored = false
elseif ready and ARGV[3] == '0' then
  redis.call('PEXPIRE', ready, redis.call('ZCARD', KEYS[3]) == 0 and 0 or FETCH_MS)
elseif ready then
  redis.call('RENAME', ready, KEYS[4])
  if ARGV[3] == '' then
    redis.call('PERSIST', KEYS[4])
  else
    redis.call('PEXPIRE', KEYS[4], ARGV[3])
  end
end

if ARGV[4] ~= '' and failed then
  local failures = tonumber(string.match(redis.call('GET', KEYS[8]) or '', '^%d+') or 0) + 1
  local pause = math.min(LONGEST_PAUSE_MS, PAUSE_MS * 2 ^ (failures - 1))
  local again = whole(math.floor(now_us() / 1000) + pause)
  redis.call('SET', KEYS[8], failures .. ' ' .. again, 'PX', pause + LONGEST_PAUSE_MS)
elseif ARGV[4] ~= '' and stored then
  redis.call('DEL', KEYS[8])
end

local entries = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
if #entries > 0 then
  local word = stored and #ARGV[6] <= SMALL and (failed and '\n!' or ready and '\n#' or '\n=') .. ARGV[6] or ''
  local now, ms = now_us(), 0
  for i = 1, #entries, 2 do
    local channel, id = string.match(entries[i], '^(.-)\n(.*)$')
    redis.pcall('PUBLISH', channel, id .. word)
    ms = ms + waited_ms(entries[i + 1], now)
  end
  if stored then
    count_waits(KEYS[2], now, ARGV[2], ms, #entries / 2, failed and #entries / 2 or 0)
    if not failed then
      count_saved(KEYS[2], now, ARGV[2], 'a', #entries / 2)
    end
  end
  redis.call('DEL', KEYS[3])
end
redis.call('DEL', KEYS[1], KEYS[5])
redis.call('ZREM', KEYS[2], ARGV[2])
if KEYS[7] then
  redis.call('HDEL', KEYS[7], ARGV[2])
end
return stored and (leased and 1 or 2) or 0

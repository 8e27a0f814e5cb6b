-- Store the computed value, unless there is a newer value; end the lease, and wake all waiters for the value.
-- KEYS  lock, index of held locks, queue, value, witness of the value, era of its bucket (see lease.lua), counts
--       of the bucket; only if the value may become stale, or was uploaded: failures to replace the stale value; and only
--       after an upload, because a script would copy a large value: upload
-- ARGV  fence of the lease, name, expiry of the value (ms, '': never, '0': it is only sent to the waiters, '!': it is
--       the error of the computation, and only sent to them, or '' for an error that does not concern them), SHA-1 of
--       the stale value that it replaces ('': none), expiry of the stale value (ms, '': unknown), the value (after an
--       upload: its length and its SHA-1, and the upload key if it is not stored), leader ('1': the lease is the
--       caller's own, else '0')
-- The waiters are sent  id \n = value ,  id \n ! error , or  id \n # length SHA-1 [key]  to fetch the value in pieces,
-- or the id alone to ask again.
-- Returns 1 when the value was stored or sent to the waiters, 2 when it was stored although the lease had ended,
-- because the witness exists, 0 when there is a newer value, and -1 when the value was invalidated, or may have been, or
-- its lease was recalled: then nothing is stored.
local PAUSE_MS, LONGEST_PAUSE_MS = 1000, 60000  -- between two tries to replace a stale value; each failure doubles it
local CLOCK_MS = 20   -- two calls may read the expiry of the same key with this difference
local FETCH_MS = 10000  -- expiry of a value that is not stored: within that time the waiters can fetch it
local SMALL = 32768  -- bytes; a larger value is not sent, but fetched by each waiter
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

local entries = redis.call('ZRANGE', queue, 0, -1, 'WITHSCORES')
if #entries > 0 then
  stored = stored and not (failed and data == '')
  local message = stored and #data <= SMALL and (failed and '\n!' or upload and '\n#' or '\n=') .. data or ''
  local now, ms = now_us(), 0
  for i = 1, #entries, 2 do
    local channel, id = string.match(entries[i], '^(.-)\n(.*)$')
    redis.pcall('PUBLISH', channel, id .. message)
    ms = ms + waited_ms(entries[i + 1], now)
  end
  if stored then
    local waits = #entries / 2
    count_waits(counts, now, name, ms, waits, failed and waits or 0, failed and 0 or waits)
  end
  redis.call('DEL', queue)
end
redis.call('DEL', lock, witness)
redis.call('ZREM', index, name)
return stored and (leased and 1 or 2) or recalled and -1 or 0

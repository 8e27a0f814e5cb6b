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
-- The value is stored in store.lua; from here on, the waiters are told.
local SMALL = 32768  -- bytes; a larger value is not sent, but fetched by each waiter
local entries = redis.call('ZRANGE', queue, 0, -1, 'WITHSCORES')
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
return stored and (leased and 1 or 2) or recalled and -1 or 0

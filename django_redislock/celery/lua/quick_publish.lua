-- Name the KEYS and ARGV of publish.lua, and take a lock that nobody holds or waits for by as few commands as possible,
-- before Lua makes the functions for all other cases. Put after take_unwanted.lua, and in front of lib.lua.
local lock, held, counter, queue, undone, counts, receipts, arguments = unpack(KEYS)
local verb, id, expire_ms, name, record, fence, newest, receipt = unpack(ARGV)
local now = now_us()
expire_ms = tonumber(expire_ms)
if verb == 'new' then
  local found = redis.call('EXISTS', lock, lock, queue, queue, undone, undone, held)
  local got = take_unwanted(found, lock, held, counter, id, name, record, now, expire_ms)
  if got then
    return tonumber(got)
  end
end

-- Name the KEYS and ARGV of acquire.lua, and take a lock without holder and waiters by as few commands as possible,
-- before Lua makes the functions for all other cases. Put after take_unwanted.lua and in front of lib.lua.
local counts = ARGV[7] ~= '' and table.remove(KEYS)
local lock, held, counter, queue, undone, receipts = unpack(KEYS)
local id, expire_ms, name, record, channel, join, ticket = unpack(ARGV)
expire_ms = tonumber(expire_ms)
local now = now_us()
if ticket == '' and not receipts then
  local found = redis.call('EXISTS', lock, lock, queue, queue, undone, undone, held)
  local fence = take_unwanted(found, lock, held, counter, id, name, record, now, expire_ms)
  if fence then
    return tonumber(fence)
  end
end

-- Name the KEYS and ARGV of start.lua, and take a lock without holder, waiters and marker by as few commands as
-- possible, before Lua makes the functions for all other cases. Put after take.lua and in front of start.lua.
local lock, held, counter, queue, marker, receipts = unpack(KEYS)
local id, expire_ms, name, record, channel, join, ticket, waiting_id, known, copies, version = unpack(ARGV)
expire_ms = tonumber(expire_ms)
local now = now_us()
if ticket == '' and not receipts then
  -- All but the index count twice, so 1 means that only the index exists.
  local found = redis.call('EXISTS', lock, lock, queue, queue, marker, marker, held)
  if found < 2 then
    enter(held, name, now, expire_ms)
    if found == 0 then
      redis.call('PEXPIRE', held, math.max(INDEX_LIFE_MS, expire_ms))
    end
    local fence, last = next_fence(counter, now)
    -- The first lock of the bucket today has already set the index's expiry to more than two weeks.
    if found == 1 and (expire_ms > DAY_MS or not last or math.floor(last / DAY_US) ~= math.floor(now / DAY_US)) then
      lengthen(held, expire_ms)
    end
    write(lock, id, fence, record, now, expire_ms)
    return tonumber(fence)
  end
end

-- Name the KEYS and ARGV of lease.lua, and take the lease of a value that is missing, and that nobody computes or waits
-- for, by as few commands as possible, before Lua makes the functions for all other cases. Put after take_unwanted.lua
-- and in front of lib.lua.
local WITNESS_LIFE_MS = 86400000  -- longer than most values, because some servers evict the shortest expiry first
local lock, held, counter, queue, value_key, witness, era, undone, failures = unpack(KEYS)
local id, expire_ms, name, record, channel, join, old_digest, has_old, due = unpack(ARGV)
local now = now_us()
expire_ms = tonumber(expire_ms)
if has_old == '0' then
  local found = redis.call('EXISTS', lock, lock, value_key, value_key, queue, queue, undone, undone, held)
  local fence = take_unwanted(found, lock, held, counter, id, name, record, now, expire_ms)
  if fence then
    redis.call('SET', era, fence, 'NX', 'PX', WITNESS_LIFE_MS)
    redis.call('SET', witness, fence, 'NX', 'PX', WITNESS_LIFE_MS)
    return {'compute', fence, ''}
  end
end

-- How a lock is taken in all other cases; put after take_unwanted.lua, lib.lua and expiry.lua.

-- Take a lock that is free, reserved for the caller, or the caller's (`value` is the lock key's), and return its fence
-- and whether that id held it before. Then its expiry is not made earlier, because its holder relies on it.
local function take(lock, held, counter, value, id, name, record, now, expire_ms)
  local fence = value and fence_of(value) or '0'
  index(held, name, now, expire_ms)  -- first: if it fails, nothing is taken
  if fence ~= '0' then  -- an earlier call took it and its reply was lost, or somebody else uses the id
    set_end(lock, value, expire_ms)
    return fence, true
  end
  fence = next_fence(counter, now)
  write(lock, id, fence, record, now, expire_ms)
  return fence, false
end

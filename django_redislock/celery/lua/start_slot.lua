-- Find that an execution of which several may run at once is not to start, because of a copy of its message; put in front
-- of the scripts that acquire a slot, after message.lua and handover.lua.
-- KEYS  as for acquire_slot.lua; if copies can be told from other messages, behind the slots: processed marker of the
--       message, and the further slots up to MAX_SLOTS, because the limit may have been higher when a copy got its slot
-- ARGV  1 to 8 as for acquire_slot.lua, 9 '1' when the message's copies can be told from other messages, 10 what the ids of its executions begin with,
--       11 its version
-- Returns what start.lua does then.
local MAX_SLOTS = 100  -- MAX_LIMIT in validation.py

if ARGV[9] == '1' then
  local id, entry = ARGV[1], ARGV[5] .. '\n' .. ARGV[1]
  local limit = tonumber(ARGV[8])
  local locks = {KEYS[1], unpack(KEYS, 5, limit + 3)}
  for i = MAX_SLOTS, limit + 1, -1 do
    locks[i] = table.remove(KEYS, i + 4)
  end
  local marker = table.remove(KEYS, limit + 4)
  local values, reserved, holds = redis.call('MGET', unpack(locks)), {}, false
  for i, value in ipairs(values) do
    if value and is_of(value, id) then
      if fence_of(value) == '0' then
        reserved[#reserved + 1] = locks[i]
      else
        holds = true
      end
    end
  end
  local reply = not holds and reply_for_copy(locks, marker, ARGV[10], tonumber(ARGV[11]), id)
  if reply then
    redis.call('ZREM', KEYS[4], entry)
    for _, lock in ipairs(reserved) do
      hand_over(lock, KEYS[4], id)
    end
    return reply
  end
end

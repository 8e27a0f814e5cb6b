-- Find that an execution of which several may run at once is not to start, because of a copy of its message; put in front
-- of the scripts that acquire a slot, after message.lua and handover.lua.
-- ARGV  1 to 8 as for acquire_slot.lua, 9 '1' when the message's copies can be told from other messages, 10 what the ids of its executions begin with,
--       11 its version
-- Returns what start.lua does then.
if ARGV[9] == '1' then
  local id, entry = ARGV[1], ARGV[5] .. '\n' .. ARGV[1]
  local locks, marker = all_slots(KEYS[1]), string.sub(KEYS[2], 1, -5) .. 'done:' .. ARGV[10]
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

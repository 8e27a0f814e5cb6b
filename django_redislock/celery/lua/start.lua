-- Start an execution: acquire the lock as acquire.lua does, take it over from the execution's own message, or find that the
-- message was worked off before.
-- KEYS  1 lock, 2 index of held locks, 3 fence counter, 4 queue, 5 mark of the message, 6 receipts, if the id was given
-- ARGV  1 id, 2 expire (ms), 3 name, 4 record, 5 channel of the waiter, 6 '1' to join the queue, 7 ticket ('': draw one),
--       8 id under which the message holds the lock while it waits, 9 '1' when its copies can be told from other messages,
--       10 what the ids of the message's executions begin with, 11 its version
-- Returns the fence when acquired, 0 when the message was processed or published again, -1 - (ms until another look) when a
-- copy of it runs or ends now, else what acquire.lua returns.
local id, life_ms = ARGV[1], tonumber(ARGV[2])
local now = now_us()
local value = redis.call('GET', KEYS[1])
local wrong = not_ours(KEYS[1], value)
if wrong then
  return wrong
end
local entry = ARGV[5] .. '\n' .. id

if ARGV[9] == '1' and not (value and is_of(value, id) and fence_of(value) ~= '0') then
  local other = in_other_hands(KEYS[1], value, KEYS[5], ARGV[10], tonumber(ARGV[11]), id)
  if other then
    redis.call('ZREM', KEYS[4], entry)
    if value and is_of(value, id) then
      hand_over(KEYS[1], KEYS[4], id)
    end
    return other
  end
end

if value and is_of(value, ARGV[8]) and fence_of(value) ~= '0' then
  value = false
elseif not (value and is_of(value, id) and fence_of(value) ~= '0') then
  local joins = ARGV[6] == '1'
  local reply = wait_for_turn(KEYS[1], KEYS[2], KEYS[4], value, id, ARGV[3], ARGV[5], joins, ARGV[7], now)
  if reply then
    return reply
  end
  value = false
end

-- A place in the queue goes with it: who waited may find the lock left to its own message.
redis.call('ZREM', KEYS[4], entry)
if ARGV[7] ~= '' then
  count_waits(KEYS[2], now, ARGV[3], waited_ms(ARGV[7], now), 1, 0)
end
if KEYS[6] then
  redis.call('ZREM', KEYS[6], 'id ' .. id)
end
local fence = take(KEYS[1], KEYS[2], KEYS[3], value, id, ARGV[3], ARGV[4], now, life_ms)
return tonumber(fence)

-- Name the KEYS and ARGV of start.lua, and start an execution whose lock, or slot, nobody holds or waits for by as few
-- commands as possible, before Lua makes the functions for all other cases. Put after take_unwanted.lua and lib.lua.
local counts = ARGV[7] ~= '' and table.remove(KEYS)
local undone = table.remove(KEYS)
local lock, held, counter, queue, marker, waiting, waiting_queue, arguments = unpack(KEYS)
local id, expire_ms, name, record, channel, join, ticket = unpack(ARGV)
local limit, waiting_id, known, copies, version, place, keep_ms, notes = unpack(ARGV, 8)
expire_ms = tonumber(expire_ms)
local now = now_us()
if ticket == '' and limit == '0' and place == '' then
  local found = redis.call('EXISTS', lock, lock, queue, queue, marker, marker, undone, undone, held)
  local fence = take_unwanted(found, lock, held, counter, id, name, record, now, expire_ms)
  if fence then
    return tonumber(fence)
  end
end
limit, version = tonumber(limit), tonumber(version)
local slots = limit == 0 and {lock} or {lock, unpack(KEYS, place ~= '' and 9 or 6)}

-- A slot that is free and not reserved, if no slot is the caller's, or that of a copy.
local values, free
if limit > 0 then
  values = redis.call('MGET', unpack(slots))
  local copy = copies .. ':'
  for i = #slots, 1, -1 do
    local value = values[i]
    if value then
      value = unmarked(value)
      if is_of(value, id) or string.sub(value, 1, #copy) == copy then
        free = nil
        break
      end
    elseif i <= limit then
      free = i
    end
  end
elseif place ~= '' then
  free = 1
end
if free and ticket == '' and place == '' then
  local slot = slots[free]
  local found = redis.call('EXISTS', slot, slot, queue, queue, marker, marker, undone, undone, held)
  local fence = take_unwanted(found, slot, held, counter, id, name .. free, record, now, expire_ms)
  if fence then
    return {ok = fence .. ' ' .. free .. ' 0 '}
  end
end

-- The message begins: end the lock under which it waited, and return the reply for an execution that has its own one.
-- `hand_over` is nil when nobody waits for the lock of the message.
local function begin(fence, slot, hand_over)
  local newest, waited
  if place ~= '' then
    local value = redis.call('GET', waiting)
    local before = value and is_of(value, waiting_id) and fence_of(value)
    if before and before ~= '0' then
      redis.pcall('ZREM', held, place)
    end
    if before and hand_over then
      hand_over(waiting, waiting_queue, '')
    elseif before then
      redis.call('DEL', waiting)
    end
    newest = before and string.match(value, ',"newest":"([^"]*)"}$')
    if newest then
      redis.call('SET', arguments, newest, 'PX', keep_ms)
    elseif before and notes == '1' then
      redis.call('SET', arguments, '', 'PX', keep_ms, 'NX')
    end
    newest = redis.call('GET', arguments)
    waited = before or newest
  end
  local has_own = (newest or '') == ''
  if limit == 0 and notes == '' and has_own then
    return tonumber(fence)
  end
  local reply = fence .. ' ' .. slot .. (waited and ' 1 ' or ' 0 ')
  return has_own and {ok = reply} or reply .. newest  -- a status is read faster, but must not be long
end

if free and ticket == '' and place ~= '' then
  local slot, own, other = slots[free], limit > 0 and name .. free or name, waiting_queue
  local found = redis.call('EXISTS', slot, slot, queue, queue, marker, marker, undone, undone, other, other, held)
  local fence = take_unwanted(found, slot, held, counter, id, own, record, now, expire_ms)
  if fence then
    return begin(fence, limit > 0 and free or 0)
  end
end

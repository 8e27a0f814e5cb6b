-- Name the KEYS and ARGV of finish.lua, and decide what becomes of the processed marker of the message. Put after
-- message.lua, and in front of finish.lua.
local lock, held, queue, receipts, marker = unpack(KEYS, 1, 5)
if not marker then
  marker, lock = lock, nil
end
local verb, expire_ms, id, name, fence, keep_id, keep_ms, record, version, word, state, copies = unpack(ARGV)
local before = verb ~= 'done' and redis.call('GET', marker)

if verb == 'refuse' then
  local locks = {unpack(KEYS, 6)}
  local reply = reply_for_copy(locks, redis.call('MGET', unpack(locks)), marker, copies, tonumber(version), word)
  if reply then
    return reply
  end
end

-- The marker after each verb, by what it was before; - : it stays. A call that was on its way for long must not undo
-- what copies have said meanwhile: that a message was processed, or that a later version was published.
local AFTER = {
  -- no marker, 'ending', 'ending:<claim>', 'done', a version
  done   = 'DDDDD',
  ending = 'EEE-E',
  keep   = '-----',
  again  = 'V-V-V',  -- V: the version, if it is later, and no claim of a copy has to stay
  refuse = 'CCCCC',  -- C: the claim
}
local was = not before and 1 or before == 'ending' and 2 or tonumber(before) and 5
  or string.find(before, '^done') and 4 or 3
local code, after = string.sub(AFTER[verb], was, was), nil
if code == 'D' then
  after = 'done'
elseif code == 'E' then
  after = 'ending'
elseif code == 'C' then
  after = state .. ':' .. word
elseif code == 'V' and not (was == 3 and word == '1') and tonumber(version) > (tonumber(before) or -1) then
  after = version
end

if not lock then
  if after then
    redis.call('SET', marker, after, 'PX', expire_ms)
  end
  return 1
end

-- Claim a message that will not run now, unless a copy of it runs or has been processed.
-- KEYS  1 lock, or the first slot of a semaphore, 2 processed marker of the message, 3 and up: the further slots that the
--       semaphore may have
-- ARGV  1 what the ids of the message's executions begin with, 2 its version, 3 this claim, 4 'ending' or 'done', 5
--       expiry of the marker (ms)
-- Returns 1 when it is the caller's, 0 when it has been processed or published again, else -1 - (ms until another try).
local lock, marker = unpack(KEYS)
local copies, version, claim, state, expire_ms = unpack(ARGV)
local locks = {lock, unpack(KEYS, 3)}
local reply = reply_for_copy(locks, redis.call('MGET', unpack(locks)), marker, copies, tonumber(version), claim)
if reply then
  return reply
end
redis.call('SET', marker, state .. ':' .. claim, 'PX', expire_ms)
return 1

-- Park a message that was refused, unless its lock is free by now: then the first parked message is woken.
-- KEYS  1 parked messages, 2 and up the lock, or all slots
-- ARGV  1 what the ids of the message's executions begin with, 2 the time of its first conflict, 3 the message, 4 expiry
--       (ms)
-- Returns the message that is to be published, or false.
local parked, copies = KEYS[1], ARGV[1]
local messages = parked .. ':messages'
redis.call('ZADD', parked, ARGV[2], copies)
redis.call('HSET', messages, copies, ARGV[3])
for _, key in ipairs({parked, messages}) do
  if redis.call('PTTL', key) < tonumber(ARGV[4]) then
    redis.call('PEXPIRE', key, ARGV[4])
  end
end
return wake({unpack(KEYS, 2)}, parked)

-- Remove the first parked message, which is to be published, if a lock is free.
-- KEYS  1 parked messages, 2 and up the lock, or all slots
-- ARGV  1 what the ids of the executions of a message begin with that is not parked any more ('': none)
-- Returns the message, or false.
if ARGV[1] ~= '' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[1] .. ':messages', ARGV[1])
end
return wake({unpack(KEYS, 2)}, KEYS[1])

-- Take a message that will not run now into the caller's hands, unless a copy of it runs or has been processed.
-- KEYS  1 lock, 2 mark of the message
-- ARGV  1 what the ids of the message's executions begin with, 2 its version, 3 this claim, 4 'ending' or 'done', 5 life of the
--       mark (ms)
-- Returns 1 when it is the caller's, 0 when it has been processed or published again, else -1 - (ms until another look).
local other = in_other_hands(KEYS[1], redis.call('GET', KEYS[1]), KEYS[2], ARGV[1], tonumber(ARGV[2]), ARGV[3])
if other then
  return other
end
redis.call('SET', KEYS[2], ARGV[4] .. ':' .. ARGV[3], 'PX', ARGV[5])
return 1

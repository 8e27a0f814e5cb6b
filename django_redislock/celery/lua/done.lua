-- Mark a message: all that comes after its execution is done, too; or it was published again.
-- KEYS  1 mark of the message
-- ARGV  1 'done', or the version that was published, 2 life of the mark (ms), 3 '1' to leave what says more
-- Returns 1.
local state = ARGV[3] == '1' and redis.call('GET', KEYS[1])
if not state or (tonumber(state) or math.huge) < tonumber(ARGV[1]) then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1

-- Confirm the mark of a message: all that comes after its execution is done, too.
-- KEYS  1 mark of the message
-- ARGV  1 life of the mark (ms)
-- Returns 1.
redis.call('SET', KEYS[1], 'done', 'PX', ARGV[1])
return 1

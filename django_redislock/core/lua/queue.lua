-- Read the first waiters for a lock.
-- KEYS  1 queue
-- ARGV  1 how many
-- Returns the server's clock (us), and {channel \n id, ticket, ...}.
local queue, number = KEYS[1], ARGV[1]
count_waiting(queue)
return {whole(now_us()), redis.call('ZRANGE', queue, 0, number - 1, 'WITHSCORES')}

-- Read the first of those who wait for a lock.
-- KEYS  1 queue
-- ARGV  1 how many
-- Returns the server's clock (us), and {channel \n id, ticket, ...}.
count_waiting(KEYS[1])
return {whole(now_us()), redis.call('ZRANGE', KEYS[1], 0, ARGV[1] - 1, 'WITHSCORES')}

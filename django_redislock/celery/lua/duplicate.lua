-- Count a duplicate of a task that was not published, or did not run.
-- KEYS  1 index of held locks
-- ARGV  1 name
-- Returns 1.
count_saved(KEYS[1], now_us(), ARGV[1], 'd', 1)
return 1

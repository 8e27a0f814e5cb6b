-- Count a duplicate of a task that was not published, or did not run.
-- KEYS  1 index of held locks
-- ARGV  1 name
-- Returns 1.
local held, name = KEYS[1], ARGV[1]
count_saved(held, now_us(), name, 'd', 1)
return 1

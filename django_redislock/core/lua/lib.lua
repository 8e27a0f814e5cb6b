-- The functions of all scripts; put in front of each script when it is loaded, after clock.lua. Functions that only some
-- scripts need have files of their own (index, expiry, take, receipts, handover, counts, turns, slots, waiters), because
-- each call makes all functions of its script anew. So what most calls need stands in front of this (quick.lua,
-- quick_release.lua, quick_publish.lua, quick_lease.lua), or behind it and in front of the other parts (quick_slot.lua,
-- quick_start.lua, store.lua): it ends the script before Lua makes the functions for all other cases.
--
-- The value of a lock key is  id \n fence \n acquired (ms) \n record , and the expiry of the key is that of the lock.
-- Fence 0 marks a reservation: the lock is free, but kept a moment for the waiter of that id. Its value is
-- id \n 0 \n end (ms) \n channel , and it stays a while after its end: it shows which waiter did not come (turns.lua).
-- A lock whose holder was asked to give it back (reset.lua) has RECALLED in front of its id, which no id contains. So is_of
-- says no, in scripts of an older version, too: nothing renews it or acquires it again by its id, and it is held until its
-- end all the same. What gives a lock back reads its value by `unmarked`.
-- A queue is a sorted set of  channel \n id  by the ticket (server clock, us) that each waiter drew.
-- The receipts of a lock are a sorted set, by fence (of newest arguments, by time): of the fence that its holder
-- released (with a mark of this holder where others may use the same id), of  id <id>  where a release named no fence,
-- and of  reset <id of the call> : the newest 1024, until two minutes after the last one.

local RESERVED_MS = 500       -- a woken waiter claims the lock within this time, or the next one is served
-- No script keeps the server busy for more than 5 ms, so it reads no more than so many entries of queues:
local MAX_CHECKED = 1024
local PASSED_OVER = 250
local REMEMBERED_MS = 5000    -- for so long after its end a reservation shows a process that does not answer
local QUEUE_LIFE_MS = 120000  -- waiters come back and renew it far more often
local RECALLED = 'recalled '

local function is_of(value, id)
  return string.sub(value, 1, #id + 1) == id .. '\n'
end

-- Return the value of a lock key without the mark of a recall, and whether it had one.
local function unmarked(value)
  if value and string.sub(value, 1, #RECALLED) == RECALLED then
    return string.sub(value, #RECALLED + 1), true
  end
  return value, false
end

local function fence_of(value)
  return string.match(value, '^[^\n]*\n(%d+)\n')
end

-- Return an error that names the key when something other than a lock wrote its value, else nil.
local function not_ours(lock, value)
  if value and not fence_of(value) then
    local advice = 'delete it, or give the lock another name or prefix.'
    return redis.error_reply('ERR The key ' .. lock .. ' has a value that no lock wrote: ' .. advice)
  end
end

-- Return how many ms are left of a reservation, and whether it has ended.
local function until_end(ends, now)
  local left = tonumber(ends) - math.floor(now / 1000)
  return left, left <= 0 or left > 2 * RESERVED_MS  -- so much only after the clock stepped back
end

-- Return when the key ends (ms; 0: never). The time is read here and not before, because on Redis 7.0 it goes on while
-- a script runs.
local function ends_at(key)
  local left = redis.call('PTTL', key)
  return left < 0 and 0 or math.floor(now_us() / 1000) + left
end

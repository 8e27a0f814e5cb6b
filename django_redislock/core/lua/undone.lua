-- Note that the calls of an attempt are given up, so that one that arrives later gets nothing; put in front of
-- release.lua, which gives back what they got. The key of the note stands behind the receipts.
-- TCP sends a packet again at most two minutes after the network is back, and a connection of asyncio that is closed
-- sends for 35 s what it still has: no call arrives later than that behind its undo. The longest expiry does not matter.
local UNDONE_LIFE_MS = 300000
local undone = table.remove(KEYS, 5)
redis.call('DEL', undone)  -- first, because after it a server without memory lets the script write
redis.call('SET', undone, '1', 'PX', UNDONE_LIFE_MS)

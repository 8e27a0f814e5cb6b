-- Mark a message as processed, with all that comes after its execution; or as published again.
-- KEYS  1 processed marker of the message
-- ARGV  1 'done', or the version that was published, 2 expiry of the marker (ms), 3 '1' to keep a marker that says more
-- Returns 1.
local marker = KEYS[1]
local state, expire_ms, careful = unpack(ARGV)
local before, version = redis.call('GET', marker), tonumber(state)
-- A call that was on its way for long must not undo what copies have said meanwhile: that a later version was
-- published, or that one of them has ended. A claim (ending:claim) is most often the caller's own.
local stays = version and before
  and (tonumber(before) or (careful ~= '1' and string.find(before, '^ending:') and 0) or math.huge) >= version
if not stays then
  redis.call('SET', marker, state, 'PX', expire_ms)
end
return 1

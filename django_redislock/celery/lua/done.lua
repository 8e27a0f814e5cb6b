-- Mark a message as processed, with all that comes after its execution; or as published again.
-- KEYS  1 processed marker of the message
-- ARGV  1 'done', or the version that was published, 2 expiry of the marker (ms), 3 '1' to keep a marker that says more
-- Returns 1.
local marker = KEYS[1]
local state, expire_ms, careful = unpack(ARGV)
local before = careful == '1' and redis.call('GET', marker)
if not before or (tonumber(before) or math.huge) < tonumber(state) then
  redis.call('SET', marker, state, 'PX', expire_ms)
end
return 1

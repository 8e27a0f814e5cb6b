-- Read the counts of the last hour (counts.lua).
-- KEYS  counts of buckets
-- ARGV  1 number of the key to go on with
-- Returns the server's clock (us), the number for the next call (0: there is none), and the fields with their values, of so
-- many at a time that the server is not kept busy for long.
local AT_ONCE = 1000
local found, at = {}, tonumber(ARGV[1])
while at <= #KEYS and #found < 2 * AT_ONCE do
  for _, text in ipairs(redis.call('HGETALL', KEYS[at])) do
    found[#found + 1] = text
  end
  at = at + 1
end
return {whole(now_us()), at <= #KEYS and at or 0, found}

-- List the names of the locks held now, so many at a time that the server is not kept busy for long.
-- KEYS  indexes of held locks
-- ARGV  1 number of the index to go on with, 2 cursor in it ('0': its beginning)
-- Returns both for the next call (number 0: there is none), the lengths of the names, and the names, each in one
-- string, because many small replies take long to read. A lock that is held all the time is listed, perhaps twice.
local AT_ONCE = 500
local now_ms = math.floor(now_us() / 1000)
local names, lengths = {}, {}
local at, cursor, seen = tonumber(ARGV[1]), ARGV[2], 0
while at <= #KEYS and seen < AT_ONCE do
  local found = redis.call('ZSCAN', KEYS[at], cursor, 'COUNT', AT_ONCE)
  local entries = found[2]
  for i = 1, #entries, 2 do
    if tonumber(entries[i + 1]) >= now_ms then
      names[#names + 1] = entries[i]
      lengths[#lengths + 1] = #entries[i]
    end
  end
  cursor, seen = found[1], seen + #entries / 2
  if cursor == '0' then
    at = at + 1
  end
end
return {at <= #KEYS and at or 0, cursor, table.concat(lengths, ' '), table.concat(names)}

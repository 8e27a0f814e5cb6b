-- Write into the record of a lease for which other leases its holder waits: it ends with the lease.
-- KEYS  lock
-- ARGV  beginning of the lock's value, by which it is the caller's; needs (JSON, '': none)
local value = redis.call('GET', KEYS[1])
if value and string.sub(value, 1, #ARGV[1]) == ARGV[1] then
  -- It is the last field of the record; within a string of JSON the quotation marks would have backslashes.
  local at = string.find(value, ',"needs":', 1, true) or #value
  local needs = ARGV[2] == '' and '' or ',"needs":' .. ARGV[2]
  redis.call('SET', KEYS[1], string.sub(value, 1, at - 1) .. needs .. '}', 'KEEPTTL')
end

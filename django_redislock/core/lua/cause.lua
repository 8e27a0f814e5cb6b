-- Return the causes of losses, as far as the server knows them. Called only after a loss was noticed.
-- KEYS  for each lock: receipts, notes of forced releases
-- ARGV  for each lock: fence of the lost acquisition
-- Returns for each lock its newest note (see reset.lua), 'released', or '' when nothing is known.
local causes = {}
for i, fence in ipairs(ARGV) do
  local receipts, notes = KEYS[2 * i - 1], KEYS[2 * i]
  local found = redis.call('ZRANGEBYSCORE', notes, fence, fence)
  causes[i] = found[#found] or redis.call('ZCOUNT', receipts, fence, fence) > 0 and 'released' or ''
end
return causes

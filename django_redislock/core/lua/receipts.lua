-- The receipts of a lock; put in front of the scripts that keep them.

local RECEIPT_LIFE_MS = 120000 -- outlives every retry of one release
local RECEIPTS = 1024

-- Keep a receipt for the end of the acquisition of that fence: when the call is repeated because its reply was lost, it
-- gets the same reply. Fences grow, so they order the receipts by time.
local function keep_receipt(receipts, receipt, fence)
  redis.call('ZADD', receipts, fence, receipt)
  redis.call('PEXPIRE', receipts, RECEIPT_LIFE_MS)
  if tonumber(fence) % 16 == 0 then
    redis.call('ZREMRANGEBYRANK', receipts, 0, -RECEIPTS - 1)
  end
end

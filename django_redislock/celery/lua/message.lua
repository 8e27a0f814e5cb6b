-- What to reply to a copy of a message. The processed marker of a message is  ending[:claim]  while a process is about
-- to say what became of it,  done[:claim]  when it has been processed, or the number of the version in which it was
-- published again.

-- Return false when the caller may run the message, 0 when it has been processed or published again, else
-- -1 - (ms until another try makes sense). `locks` are the lock keys that a copy of it may hold, and `values` their
-- values; `copies` is what the ids of the message's executions begin with, `own` the caller's id or claim.
local function reply_for_copy(locks, values, marker, copies, version, own)
  local state = redis.call('GET', marker)
  if state then
    local later = tonumber(state)
    local word, claim = string.match(state, '^(%a+):?(.*)$')
    if later and later > version or word == 'done' and claim ~= own then
      return 0
    end
    -- Who claimed an earlier version has published this one, and could perhaps not say so: the message waited beside a
    -- free lock until the claim had expired.
    local claimed = tonumber(string.match(claim or '', '^(%d+)%.'))
    if word == 'ending' and claim ~= own and not (claimed and claimed < version) then
      return -1 - math.max(0, redis.call('PTTL', marker))
    end
  end
  for i, lock in ipairs(locks) do
    local value = unmarked(values[i])  -- a run that was recalled goes on until it gives the lock back
    local is_copy = value and string.sub(value, 1, #copies + 1) == copies .. ':' and fence_of(value) ~= '0'
    if is_copy and not is_of(value, own) then
      return -1 - math.max(0, redis.call('PTTL', lock))
    end
  end
  return false
end

-- The counts of the contention page; put in front of the scripts that count. They are in one hash for each bucket, and take
-- bounded space:  n<name>  has the counts of a name, for each ten minutes of the last hour in which it had any, the newest
-- first, as  number of the ten minutes, ms waited, waits, waits that were given up, prevented duplicates of tasks, avoided
-- computations;  and  m<minute % MINUTES>  has  minute, ms waited, waits . Errors are ignored.

local WINDOW_US, MINUTE_US = 600000000, 60000000
local COUNTS_LIFE_MS = 80 * 60000
local MINUTES = 80
local HIGHEST = 32  -- so many names with the longest waits stay, and so many that saved most, when there are MOST fields
local MOST = MINUTES + 4 * HIGHEST

-- Return the counts of a name without those of more than an hour ago, and the sums of what is left: ms, and saved work.
local function of_last_hour(text, window)
  local ms, saved = 0, 0
  text = string.gsub(text, '(%d+) (%d+) (%d+ %d+) (%d+) (%d+);', function(at, waited, _, duplicates, avoided)
    if tonumber(at) < window - 6 then
      return ''
    end
    ms, saved = ms + waited, saved + duplicates + avoided
  end)
  return text, ms, saved
end

local function remove_lowest(counts, window)
  local found, names, keep = redis.call('HGETALL', counts), {}, {}
  for i = 1, #found, 2 do
    if string.sub(found[i], 1, 1) == 'n' then
      local _, ms, saved = of_last_hour(found[i + 1], window)
      names[#names + 1] = {found[i], ms, saved}
    end
  end
  for by = 2, 3 do
    table.sort(names, function(a, b)
      return a[by] > b[by]
    end)
    for i = 1, math.min(#names, HIGHEST) do
      if names[i][by] > 0 then
        keep[names[i][1]] = true
      end
    end
  end
  for _, each in ipairs(names) do
    if not keep[each[1]] then
      redis.call('HDEL', counts, each[1])
    end
  end
end

local function add(counts, now, name, ms, waits, gave_up, duplicates, avoided)
  local window, minute = math.floor(now / WINDOW_US), math.floor(now / MINUTE_US)
  local of_name, of_minute = 'n' .. name, 'm' .. minute % MINUTES
  local before = redis.call('HMGET', counts, of_name, of_minute)
  local fields = {of_name}
  local at, w, n, g, d, a, older = string.match(before[1] or '', '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+);(.*)$')
  local is_new = tonumber(at) ~= window
  if is_new then
    w, n, g, d, a, older = 0, 0, 0, 0, 0, of_last_hour(before[1] or '', window)
  end
  local numbers = {whole(window), whole(w + ms), n + waits, g + gave_up, d + duplicates, a + avoided}
  fields[2] = table.concat(numbers, ' ') .. ';' .. older
  if waits > 0 then
    local of, waited, number = string.match(before[2] or '', '^(%d+) (%d+) (%d+)$')
    if tonumber(of) ~= minute then
      waited, number = 0, 0
    end
    fields[3], fields[4] = of_minute, whole(minute) .. ' ' .. whole(waited + ms) .. ' ' .. number + waits
  end
  redis.call('HSET', counts, unpack(fields))
  if is_new then
    redis.call('PEXPIRE', counts, COUNTS_LIFE_MS)
    if redis.call('HLEN', counts) > MOST then
      remove_lowest(counts, window)
    end
  end
end

-- Count waits that ended: their number, their length in all; `gave_up` of them got nothing, and so many avoided a
-- computation. None without `counts`.
local function count_waits(counts, now, name, ms, waits, gave_up, avoided)
  if counts and string.sub(name, 1, 17) ~= 'redislock-doctor:' then  -- a trial, for which nobody waited
    pcall(add, counts, now, name, ms, waits, gave_up, 0, avoided or 0)
  end
end

local function waited_ms(ticket, now)
  return math.max(0, math.floor((now - tonumber(ticket)) / 1000))
end

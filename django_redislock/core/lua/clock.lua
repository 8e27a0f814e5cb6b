-- The server's clock; put in front of everything that asks for the time.

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function whole(number)  -- Lua would write large numbers with an exponent
  return string.format('%.0f', number)
end

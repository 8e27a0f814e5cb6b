"""A check in front of each script: it uses only the keys that its caller names in KEYS. Some servers insist on that."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .scripts import all_scripts

ALL = -1
KEYS_OF: dict[bytes, tuple[int, int]] = {
    **dict.fromkeys((b"TIME", b"PUBLISH", b"PUBSUB"), (1, 0)),
    **dict.fromkeys((b"MGET", b"DEL", b"UNLINK", b"EXISTS"), (1, ALL)),
    b"RENAME": (1, 2),
    **dict.fromkeys(b"GET SET PTTL PEXPIRE PERSIST STRLEN GETRANGE SETRANGE".split(), (1, 1)),
    **dict.fromkeys(b"HDEL HGETALL HLEN HMGET HSET".split(), (1, 1)),
    **dict.fromkeys(b"ZADD ZCARD ZCOUNT ZPOPMIN ZRANGE ZRANGEBYSCORE ZRANK ZREM".split(), (1, 1)),
    **dict.fromkeys(b"ZREMRANGEBYRANK ZSCAN ZSCORE".split(), (1, 1)),
}
"""By command: the positions of its first and its last key. A script must not use a command that is not in here."""

CHECK = """
local redis, pcall = (function(redis, pcall)
  local keys_of, named, wrong = {KEYS_OF}, {}
  for _, key in ipairs(KEYS) do
    named[key] = true
  end
  local function checked(run)
    return function(...)
      local parts = {...}
      local keys = keys_of[parts[1]]
      if not keys then
        wrong = wrong or 'unknown command ' .. tostring(parts[1])
      else
        for i = keys[1] + 1, keys[2] < 0 and #parts or keys[2] + 1 do
          wrong = wrong or not named[parts[i]] and 'undeclared key ' .. tostring(parts[i]) .. ' of ' .. parts[1]
        end
      end
      if wrong then
        error(wrong, 0)
      end
      return run(...)
    end
  end
  local function not_hiding(...)
    if wrong then
      error(wrong, 0)
    end
    return ...
  end
  local mine = {call = checked(redis.call), pcall = checked(redis.pcall)}
  mine.error_reply, mine.status_reply, mine.sha1hex = redis.error_reply, redis.status_reply, redis.sha1hex
  return mine, function(...)
    return not_hiding(pcall(...))
  end
end)(redis, pcall)
""".replace("KEYS_OF", ", ".join(f"{name.decode()} = {{{first}, {last}}}" for name, (first, last) in KEYS_OF.items()))
"""Lua that puts a `redis` of its own in front of the server's. A script cannot catch what it raises."""


@contextmanager
def checking_keys() -> Iterator[None]:
    """Let this process run each script with the check in front."""
    with pytest.MonkeyPatch.context() as patch:
        for script in all_scripts():
            text = CHECK.encode() + script.text
            patch.setattr(script, "text", text)
            patch.setattr(script, "sha", hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())
        yield

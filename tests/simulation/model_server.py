"""A Redis server as a model: it executes the shipped Lua over a dict, at the time that it is given."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from lupa.lua51 import LuaRuntime
from redis.exceptions import ResponseError

from tests.support.declared_keys import ALL, KEYS_OF

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Status(bytes):
    """A reply such as OK."""


class Interpreter:
    """One Lua interpreter for all servers compiles a script once. The server whose script runs is the current one."""

    def __init__(self) -> None:
        self.server: ModelServer | None = None
        self._named: frozenset[bytes] = frozenset()
        self._undeclared: bytes | None = None
        lua = LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        self.table = lua.table_from
        self._load = lua.eval(b"function(text) return assert(loadstring(text)) end")
        self._chunks: dict[bytes, Any] = {}
        # An error of a command is one of Lua's own, which scripts may catch.
        raising = lua.eval(
            b"function(f) return function(...) local r = f(...)"
            b" if type(r) == 'table' and r.err then error(r.err, 0) end return r end end"
        )
        self._globals = lua.globals()
        self._globals[b"redis"] = self.table(
            {
                b"call": raising(self._called),
                b"pcall": self._called,
                b"error_reply": self._error,
                b"status_reply": self._ok,
                b"sha1hex": lambda text: hashlib.sha1(text, usedforsecurity=False).hexdigest().encode(),
            }
        )

    def run(self, server: ModelServer, text: bytes, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> Any:
        """Run a script, and return its reply as redis-py's parser does; raises ResponseError.

        Raises AssertionError when it uses a key that is not in KEYS.
        """
        self.server = server
        self._named, self._undeclared = frozenset(keys), None
        chunk = self._chunks.get(text)
        if chunk is None:
            chunk = self._chunks[text] = self._load(text)
        self._globals[b"KEYS"] = self.table(keys)
        self._globals[b"ARGV"] = self.table(args)
        reply = self._reply(chunk())
        assert self._undeclared is None, f"the script uses {self._undeclared!r}, which is not in KEYS"
        return reply

    def _reply(self, value: Any) -> Any:
        kind = type(value)
        if kind is int or kind is bytes or value is None:
            return value
        if kind is bool:
            return 1 if value else None
        if kind is float:
            return int(value)
        if value[b"err"] is not None:
            raise ResponseError(value[b"err"].decode())
        if value[b"ok"] is not None:
            return value[b"ok"]
        replies: list[Any] = []
        while (item := value[len(replies) + 1]) is not None:
            replies.append(self._reply(item))
        return replies

    def _called(self, *parts: Any) -> Any:
        try:
            command = COMMANDS[parts[0]]
        except KeyError:
            return self._error(b"ERR unknown command '%b'" % parts[0].lower())
        first, last = KEYS_OF[parts[0]]
        for key in parts[first:] if last == ALL else parts[first : last + 1]:
            if key not in self._named:
                self._undeclared = key
        try:
            reply = command(self.server, *[part if type(part) is bytes else self._argument(part) for part in parts[1:]])
        except ResponseError as error:
            return self._error(str(error).encode())
        kind = type(reply)
        if kind is int or kind is bytes:
            return reply
        return False if reply is None else self._to_lua(reply)

    @staticmethod
    def _argument(part: Any) -> bytes:
        if isinstance(part, (int, float)) and not isinstance(part, bool):
            return b"%.17g" % part
        raise ResponseError("Lua redis lib command arguments must be strings or integers")

    def _to_lua(self, reply: Any) -> Any:
        if reply is None:
            return False
        if isinstance(reply, Status):
            return self._ok(bytes(reply))
        if isinstance(reply, list):
            return self.table([item if type(item) is bytes else self._to_lua(item) for item in reply])
        return reply

    def _error(self, text: bytes) -> Any:
        return self.table({b"err": text})

    def _ok(self, text: bytes) -> Any:
        return self.table({b"ok": text})


interpreter = Interpreter()


class ModelServer:
    """The commands that the scripts use.

    `now` returns the time in microseconds. `subscribers` has, by channel, what is called with each message.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._us = 0
        self.data: dict[bytes, Any] = {}
        """bytes for a string, dict[bytes, float] for a sorted set, Hash for a hash."""
        self.ends: dict[bytes, int] = {}
        """When a key expires, in milliseconds; not in here: never."""
        self.subscribers: dict[bytes, dict[object, Callable[[bytes], None]]] = {}

    def run(self, text: bytes, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> Any:
        """Run a script, and return its reply as redis-py's parser does; raises ResponseError."""
        self._us = self._now()
        return interpreter.run(self, text, keys, args)

    def command(self, *parts: bytes) -> Any:
        """Run one command; raises ResponseError."""
        self._us = self._now()
        if parts[0] not in COMMANDS:
            raise ResponseError(f"ERR unknown command '{parts[0].decode().lower()}'")
        return COMMANDS[parts[0]](self, *parts[1:])

    def peek(self, key: bytes) -> Any:
        """Return the value of a key, None when it has expired."""
        self._us = self._now()
        return self._get(key)

    def live_keys(self) -> list[bytes]:
        """Return the keys that have not expired."""
        self._us = self._now()
        return [key for key in list(self.data) if self._get(key) is not None]

    # The commands

    @property
    def time_ms(self) -> int:
        """When the last script or command ran."""
        return self._us // 1000

    def _get(self, key: bytes, kind: type | None = None) -> Any:
        ends = self.ends.get(key)
        if ends is not None and self._us // 1000 > ends:
            self._drop(key)
        value = self.data.get(key)
        if value is not None and kind is not None and type(value) is not kind:
            raise ResponseError(WRONG_TYPE)
        return value

    def _drop(self, key: bytes) -> bool:
        self.ends.pop(key, None)
        return self.data.pop(key, None) is not None

    def _do_time(self) -> list[bytes]:
        return [b"%d" % (self._us // 1_000_000), b"%d" % (self._us % 1_000_000)]

    def _do_get(self, key: bytes) -> bytes | None:
        return self._get(key, bytes)  # type: ignore[no-any-return]

    def _do_mget(self, *keys: bytes) -> list[bytes | None]:
        return [value if isinstance(value := self._get(key), bytes) else None for key in keys]

    def _do_getrange(self, key: bytes, start: bytes, stop: bytes) -> bytes:
        return (self._get(key, bytes) or b"")[self._whole(start) : self._whole(stop) + 1]

    def _do_setrange(self, key: bytes, at: bytes, piece: bytes) -> int:
        before, start = self._get(key, bytes) or b"", self._whole(at)
        self.data[key] = before[:start].ljust(start, b"\0") + piece + before[start + len(piece) :]
        return len(self.data[key])

    def _do_strlen(self, key: bytes) -> int:
        return len(self._get(key, bytes) or b"")

    def _do_set(self, key: bytes, value: bytes, *options: bytes) -> Any:
        words = [option.upper() for option in options]
        get = b"GET" in words
        before = self._get(key, bytes) if get else self._get(key)
        if (b"NX" in words and before is not None) or (b"XX" in words and before is None):
            return before if get else None
        if b"KEEPTTL" not in words:
            self.ends.pop(key, None)
        self.data[key] = value
        if b"PX" in words:
            life = self._whole(options[words.index(b"PX") + 1])
            if life <= 0:
                raise ResponseError("ERR invalid expire time in 'set' command")
            self.ends[key] = self.time_ms + life
        return before if get else Status(b"OK")

    @staticmethod
    def _whole(text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise ResponseError("ERR value is not an integer or out of range") from None

    def _do_del(self, *keys: bytes) -> int:
        return sum(self._get(key) is not None and self._drop(key) for key in keys)

    _do_unlink = _do_del

    def _do_exists(self, *keys: bytes) -> int:
        return sum(self._get(key) is not None for key in keys)

    def _do_pttl(self, key: bytes) -> int:
        if self._get(key) is None:
            return -2
        return max(0, self.ends[key] - self.time_ms) if key in self.ends else -1

    def _do_pexpire(self, key: bytes, life: bytes) -> int:
        if self._get(key) is None:
            return 0
        self.ends[key] = self.time_ms + self._whole(life)
        if self.ends[key] <= self.time_ms:
            self._drop(key)
        return 1

    def _do_persist(self, key: bytes) -> int:
        return int(self._get(key) is not None and self.ends.pop(key, None) is not None)

    def _do_rename(self, key: bytes, other: bytes) -> Status:
        if self._get(key) is None:
            raise ResponseError("ERR no such key")
        self._drop(other)
        self.data[other] = self.data.pop(key)
        if key in self.ends:
            self.ends[other] = self.ends.pop(key)
        return Status(b"OK")

    def _do_publish(self, channel: bytes, message: bytes) -> int:
        found = list(self.subscribers.get(channel, {}).values())
        for hear in found:
            hear(message)
        return len(found)

    def _do_pubsub(self, what: bytes, *channels: bytes) -> list[Any]:
        return [item for channel in channels for item in (channel, len(self.subscribers.get(channel, {})))]

    # Sorted sets

    def _sorted(self, key: bytes) -> list[tuple[float, bytes]]:
        return sorted((score, member) for member, score in (self._get(key, dict) or {}).items())

    @staticmethod
    def _score(score: float) -> bytes:
        return b"%d" % score if score == int(score) and abs(score) < 1e17 else b"%.17g" % score

    def _do_zadd(self, key: bytes, *rest: bytes) -> int:
        options = {word.upper() for word in rest if word.upper() in (b"NX", b"XX", b"GT", b"LT", b"CH")}
        pairs = rest[len(options) :]
        members = self._get(key, dict)
        if members is None:
            members = self.data[key] = {}
        added = 0
        for score_, member in zip(pairs[::2], pairs[1::2], strict=True):
            score = float(score_)
            there = member in members
            if (b"NX" in options and there) or (b"XX" in options and not there):
                continue
            if there and (
                (b"GT" in options and score <= members[member]) or (b"LT" in options and score >= members[member])
            ):
                continue
            added += not there
            members[member] = score
        if not members:
            self._drop(key)
        return added

    def _do_zrem(self, key: bytes, *gone: bytes) -> int:
        members = self._get(key, dict) or {}
        number = sum(members.pop(member, None) is not None for member in gone)
        if not members:
            self._drop(key)
        return number

    def _do_zcard(self, key: bytes) -> int:
        return len(self._get(key, dict) or {})

    def _do_zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = (self._get(key, dict) or {}).get(member)
        return None if score is None else self._score(score)

    def _do_zrank(self, key: bytes, member: bytes) -> int | None:
        return next((rank for rank, (_, other) in enumerate(self._sorted(key)) if other == member), None)

    def _do_zpopmin(self, key: bytes, count: bytes = b"1") -> list[bytes]:
        found = self._sorted(key)[: self._whole(count)]
        self._do_zrem(key, *(member for _, member in found))
        return [item for score, member in found for item in (member, self._score(score))]

    @staticmethod
    def _slice(items: list[Any], start: int, stop: int) -> list[Any]:
        start = max(0, start + len(items)) if start < 0 else start
        stop = stop + len(items) if stop < 0 else stop
        return items[start : stop + 1] if stop >= 0 else []

    def _do_zrange(self, key: bytes, start: bytes, stop: bytes, *options: bytes) -> list[bytes]:
        found = self._slice(self._sorted(key), self._whole(start), self._whole(stop))
        if options:
            return [item for score, member in found for item in (member, self._score(score))]
        return [member for _, member in found]

    @staticmethod
    def _bound(text: bytes) -> tuple[float, bool]:
        return (float(text[1:]), True) if text.startswith(b"(") else (float(text), False)

    def _between(self, key: bytes, low: bytes, high: bytes) -> list[bytes]:
        (least, above), (most, below) = self._bound(low), self._bound(high)
        return [
            member
            for score, member in self._sorted(key)
            if (score > least if above else score >= least) and (score < most if below else score <= most)
        ]

    def _do_zrangebyscore(self, key: bytes, low: bytes, high: bytes, *options: bytes) -> list[bytes]:
        found = self._between(key, low, high)
        if options:  # LIMIT
            offset, count = self._whole(options[1]), self._whole(options[2])
            found = found[offset : offset + count]
        return found

    def _do_zcount(self, key: bytes, low: bytes, high: bytes) -> int:
        return len(self._between(key, low, high))

    def _do_zremrangebyrank(self, key: bytes, start: bytes, stop: bytes) -> int:
        found = self._slice(self._sorted(key), self._whole(start), self._whole(stop))
        return self._do_zrem(key, *(member for _, member in found)) if found else 0

    def _do_zscan(self, key: bytes, cursor: bytes, *options: bytes) -> list[Any]:
        found = [item for score, member in self._sorted(key) for item in (member, self._score(score))]
        return [b"0", found]

    # Hashes

    def _do_hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        found = self._get(key, Hash) or Hash()
        return [found.get(field) for field in fields]

    def _do_hgetall(self, key: bytes) -> list[bytes]:
        return [item for pair in (self._get(key, Hash) or Hash()).items() for item in pair]

    def _do_hset(self, key: bytes, *pairs: bytes) -> int:
        fields = self._get(key, Hash)
        if fields is None:
            fields = self.data[key] = Hash()
        added = len(set(pairs[::2]) - fields.keys())
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return added

    def _do_hlen(self, key: bytes) -> int:
        return len(self._get(key, Hash) or ())

    def _do_hdel(self, key: bytes, *gone: bytes) -> int:
        fields = self._get(key, Hash) or Hash()
        number = sum(fields.pop(field, None) is not None for field in gone)
        if not fields:
            self._drop(key)
        return number


class Hash(dict[bytes, bytes]):
    """The value of a hash."""


COMMANDS: dict[bytes, Callable[..., Any]] = {
    name.removeprefix("_do_").upper().encode(): command
    for name, command in vars(ModelServer).items()
    if name.startswith("_do_")
}

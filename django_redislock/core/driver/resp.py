"""Requests and replies as they are on the wire (RESP2).

redis-py's own way to send and to parse is made for more than a lock needs, and costs a good part of a wake-up.
"""

from __future__ import annotations

import re
from typing import Any

from redis._parsers import BaseParser
from redis.exceptions import ConnectionError, InvalidResponse, RedisError

BULK, INTEGER, ARRAY, STATUS, ERROR = b"$:*+-"
"""What a reply begins with."""
# From a script, Redis 6.2 puts its own words before the error.
_NOT_PRIMARY = re.compile("(?:ERR Error running script .*: -)?(?:READONLY|MASTERDOWN|NOREPLICAS|LOADING) ", re.DOTALL)


class NotPrimary(ConnectionError):
    """The server is no primary that can write now: the next connection may lead to another server."""


class Incomplete(Exception):
    """The rest of the reply has not arrived: so many bytes at least."""

    def __init__(self, missing: int) -> None:
        super().__init__(missing)
        self.missing = missing


def pack(*parts: bytes) -> bytes:
    """Return a command as it is sent."""
    # One format takes half the time of part after part, and no more memory than the command.
    return b"*%d\r\n" % len(parts) + PART * len(parts) % sized(parts)


PART = b"$%d\r\n%b\r\n"
"""The format of a part; its values are the size and the part itself."""


def sized(parts: tuple[bytes, ...]) -> tuple[int | bytes, ...]:
    """Return the size of each part, and the part."""
    both: list[int | bytes] = [0] * (2 * len(parts))
    both[::2] = map(len, parts)
    both[1::2] = parts
    return tuple(both)


class Replies:
    """The replies in the arriving pieces of data; each byte is read once."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0
        self._begun: list[tuple[list[Any], int]] = []
        """The arrays that are not complete yet, from the outermost, and how long they will be."""

    @property
    def empty(self) -> bool:
        """Whether no arrived byte is left."""
        return self._at == len(self._data)

    @property
    def whole(self) -> bool:
        """Whether the last reply was returned whole."""
        return self.empty and not self._begun

    def add(self, data: bytes) -> None:
        """Add an arrived piece."""
        if self._at:
            del self._data[: self._at]
            self._at = 0
        self._data += data

    def next(self) -> Any:
        """Return the next reply; what the server calls an error is returned as one.

        Raises Incomplete, and InvalidResponse or ValueError for what is no reply.
        """
        data = self._data
        while True:
            end = data.find(b"\r\n", self._at)
            if end < 0:
                raise Incomplete(1)
            kind, line, at = data[self._at], data[self._at + 1 : end], end + 2
            reply: Any = None
            if kind == BULK:
                end = at + int(line)
                if end >= at:
                    if len(data) < end + 2:
                        raise Incomplete(end + 2 - len(data))
                    reply = bytes(memoryview(data)[at:end])
                    at = end + 2
            elif kind == INTEGER:
                reply = int(line)
            elif kind == ARRAY:
                reply, length = [], int(line)
                if length > 0:
                    self._begun.append((reply, length))
                    self._at = at
                    continue
            elif kind == STATUS:
                reply = bytes(line)
            elif kind == ERROR:
                reply = _error(line.decode(errors="replace"))
            else:
                raise InvalidResponse(f"Protocol error: {bytes(data[self._at : self._at + 100])!r}")
            self._at = at
            while self._begun:  # the reply belongs to an array, and may be its last item
                items, length = self._begun[-1]
                items.append(reply)
                if len(items) < length:
                    break
                reply, _ = self._begun.pop()
            else:
                if at == len(data):
                    data.clear()
                    self._at = 0
                return reply


def _error(line: str) -> RedisError:
    if _NOT_PRIMARY.match(line):
        return NotPrimary(line)
    return BaseParser.parse_error(line)  # type: ignore[no-untyped-call,no-any-return]


HELLO = pack(b"HELLO")


def check_role(hello: Any) -> None:
    """Raise NotPrimary when the reply to HELLO is that of a replica; an error in its place proves nothing."""
    if isinstance(hello, list) and hello[hello.index(b"role") + 1] != b"master":
        raise NotPrimary("The address leads to a replica.")

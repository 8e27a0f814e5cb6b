"""Requests and replies in Redis's protocol (RESP2), and the errors that replies mean.

redis-py's own encoder and parser are made for more than a lock needs, and take a good part of the time of a wake-up.

A reply may say that the server cannot write, because after a failover an address leads to another server, while
connections to the former primary stay open. The rule of both drivers:

* An error reply that says so becomes `NotPrimary`, a ConnectionError: `with_retries` tries again.
* The driver distrusts all connections that it has. Each is closed before it is used again; a new one may lead to the
  new primary.
* Before the next subscription the role of the server is checked, because a replica accepts SUBSCRIBE and sends no
  wake-ups.
"""

from __future__ import annotations

import re
from typing import Any

from redis.exceptions import ConnectionError, InvalidResponse, ReadOnlyError, RedisError

from .kinds import parse_error

_NOT_PRIMARY = re.compile("(?:READONLY|MASTERDOWN|NOREPLICAS|LOADING) ")
# From a script, Redis 6.2 puts its own words before the error.
_OF_SCRIPT = re.compile("ERR Error running script .*: -(?=[A-Z]+ )", re.DOTALL)


class NotPrimary(ConnectionError):
    """The server is no primary that can write now: the next connection may lead to another server.

    `reply` is the error that redis-py makes of the reply: a cache raises that one.
    """

    def __init__(self, text: str, reply: RedisError | None = None) -> None:
        super().__init__(text)
        self.reply = reply or ReadOnlyError(text)


def error_of(line: str) -> RedisError:
    """Return the error that an error reply means."""
    own = _OF_SCRIPT.sub("", line)
    error = parse_error(own)
    return NotPrimary(line, error) if _NOT_PRIMARY.match(own) else error


def check_role(hello: Any) -> None:
    """Raise NotPrimary when the reply to HELLO is that of a replica; an error in its place proves nothing."""
    if isinstance(hello, list) and hello[hello.index(b"role") + 1] != b"master":
        raise NotPrimary("The address leads to a replica.")


BULK, INTEGER, ARRAY, STATUS, ERROR = b"$:*+-"
"""The first byte of each kind of reply."""


class Incomplete(Exception):
    """The rest of the reply has not arrived: at least `missing` bytes."""

    def __init__(self, missing: int) -> None:
        self.missing = missing


def encode_command(*parts: bytes) -> bytes:
    """Return the request that runs a command."""
    # One format takes half the time of a loop over the parts, and no more memory than the request.
    return b"*%d\r\n" % len(parts) + PART * len(parts) % with_sizes(parts)


PART = b"$%d\r\n%b\r\n"
"""The format of one part; its values are the size and the part itself."""


def with_sizes(parts: tuple[bytes, ...]) -> tuple[int | bytes, ...]:
    """Return the parts, each after its size."""
    both: list[int | bytes] = [0] * (2 * len(parts))
    both[::2] = map(len, parts)
    both[1::2] = parts
    return tuple(both)


class Replies:
    """Parses the replies in the pieces of data that arrive; each byte is parsed once."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._position = 0
        self._arrays: list[tuple[list[Any], int]] = []
        """The arrays that are not complete yet, from the outermost to the innermost, each with its length."""

    @property
    def empty(self) -> bool:
        """Whether all bytes that arrived were parsed."""
        return self._position == len(self._data)

    @property
    def at_reply_start(self) -> bool:
        """Whether the next byte to arrive begins a reply."""
        return not self._arrays and self._position == len(self._data)

    def add(self, data: bytes) -> None:
        """Add a piece of data that arrived."""
        if self._position:
            del self._data[: self._position]
            self._position = 0
        self._data += data

    def next(self) -> Any:
        """Return the next reply; for an error reply, the error.

        Raises Incomplete when the rest has not arrived, and InvalidResponse or ValueError for data that is no reply.
        """
        # One loop for all kinds, without a function for each: most replies are one line, and each of them would pay for
        # the call. Arrays are no recursion, because a reply may break off at any depth, and no byte is parsed again.
        data, arrays = self._data, self._arrays
        while True:
            start = self._position
            end = data.find(b"\r\n", start)
            if end < 0:
                raise Incomplete(1)
            kind, line, at = data[start], data[start + 1 : end], end + 2
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
                length = int(line)
                reply = [] if length >= 0 else None
                if length > 0:
                    arrays.append((reply, length))
                    self._position = at
                    continue
            elif kind == STATUS:
                reply = bytes(line)
            elif kind == ERROR:
                reply = error_of(line.decode(errors="replace"))
            else:
                raise InvalidResponse(f"Protocol error: {bytes(data[start : start + 100])!r}")
            self._position = at
            while arrays:  # the reply belongs to an array, and may be its last item
                items, length = arrays[-1]
                items.append(reply)
                if len(items) < length:
                    break
                reply, _ = arrays.pop()
            else:
                if at == len(data):
                    data.clear()
                    self._position = 0
                return reply

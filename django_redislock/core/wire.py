"""Requests and replies as they are on the wire (RESP2), and a connection spoken to directly.

redis-py opens the connection, with its passwords, its TLS and its unix sockets. Its own way to send and to parse is made for
more than a lock needs, and costs a good part of a wake-up.
"""

from __future__ import annotations

import codecs
import re
from builtins import TimeoutError as TimeoutError_
from typing import Any

from redis._parsers import BaseParser
from redis.exceptions import ConnectionError, InvalidResponse, RedisError, TimeoutError

BULK, INTEGER, ARRAY, STATUS, ERROR = b"$:*+-"
"""What a reply begins with."""
# From a script, Redis 6.2 puts its own words before the error.
_NOT_PRIMARY = re.compile("(?:ERR Error running script .*: -)?(?:READONLY|MASTERDOWN|NOREPLICAS|LOADING) ", re.DOTALL)

LEAST, MOST = 4096, 1 << 20
"""Bytes that are read at once: at first the least, then twice as many while the reads are full."""


# The first lookup of a host name imports this codec. If a signal handler looked up a name during the import, Python
# remembered that the codec does not exist, and no connection could be opened any more.
codecs.lookup("idna")


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


class Wire:
    """A connection of redis-py, for one thread at a time."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._replies = Replies()
        self._at_once = LEAST

    def connect(self) -> None:
        """Open the connection. Raises redis-py's errors."""
        self._replies = Replies()
        self.connection.connect()

    def send(self, request: bytes) -> None:
        """Send, and connect before if need be. Raises ConnectionError and TimeoutError, and what connecting does."""
        if self.connection._sock is None:
            self.connect()
        try:
            self.connection._sock.sendall(request)
        except OSError as error:
            raise _told(error) from error

    def receive(self) -> Any:
        """Return the next reply; one that calls itself an error is raised.

        Raises ConnectionError, and TimeoutError when the socket's time is over: then what has arrived is kept for the next call.
        """
        if self._replies.empty:
            data = self._read(1)
            if (
                data[0] == INTEGER and data[1:-2].isdigit() and data[-2:] == b"\r\n" and self._replies.whole
            ):  # the reply to most calls for a lock
                return int(data[1:-2])
            self._replies.add(data)
        while True:
            try:
                reply = self._replies.next()
                break
            except Incomplete as incomplete:
                self._replies.add(self._read(incomplete.missing))
            except ValueError as error:
                raise InvalidResponse(f"Protocol error: {error}") from error
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def _read(self, missing: int) -> bytes:
        sock = self.connection._sock
        if sock is None:
            raise ConnectionError("The connection is closed.")
        size = min(max(missing, self._at_once), MOST)
        try:
            data: bytes = sock.recv(size)
        except OSError as error:
            raise _told(error) from error
        if not data:
            raise ConnectionError("Connection closed by server.")
        self._at_once = min(2 * size, MOST) if len(data) == size else LEAST
        return data

    def limit(self, seconds: float, connecting: float) -> None:
        """Let nothing take longer than so many seconds from now on, and connecting not longer than so many."""
        self.connection.socket_timeout, self.connection.socket_connect_timeout = seconds, connecting
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Let receiving take so long, on this connection."""
        if self.connection._sock is not None:
            self.connection._sock.settimeout(seconds)

    @property
    def open(self) -> bool:
        """Whether there is a connection."""
        return self.connection._sock is not None

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        self.connection.disconnect()


def _told(error: OSError) -> RedisError:
    """Return the error as redis-py calls it."""
    # The socket's own timeout, not the kernel's ETIMEDOUT, which ends the connection.
    if isinstance(error, TimeoutError_) and error.errno is None:
        return TimeoutError("Timeout on the socket")
    return ConnectionError(f"Connection lost: {error}")

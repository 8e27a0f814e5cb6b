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


# The first name that is resolved imports this codec. Where a signal handler came in and resolved one, too, Python remembered that
# there is no such codec, and no connection was to be had any more.
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
    # By one format it takes half the time of part after part, and no room beside that of the command.
    return b"*%d\r\n" % len(parts) + PART * len(parts) % sized(parts)


PART = b"$%d\r\n%b\r\n"
"""The format of a part, to be given its size and the part itself."""


def sized(parts: tuple[bytes, ...]) -> tuple[int | bytes, ...]:
    """Return the size of each part, and the part."""
    both: list[int | bytes] = [0] * (2 * len(parts))
    both[::2] = map(len, parts)
    both[1::2] = parts
    return tuple(both)


def parse(data: bytearray, at: int) -> tuple[Any, int]:
    """Return the reply that begins there, and where it ends; what the server calls an error is returned as one.

    Raises Incomplete, and InvalidResponse or ValueError for what is no reply.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Incomplete(1)
    kind, line, at = data[at], data[at + 1 : end], end + 2
    if kind == BULK:
        end = at + int(line)
        if end < at:
            return None, at
        if len(data) < end + 2:
            raise Incomplete(end + 2 - len(data))
        return bytes(data[at:end]), end + 2
    if kind == INTEGER:
        return int(line), at
    if kind == ARRAY:
        items = []
        for _ in range(int(line)):
            item, at = parse(data, at)
            items.append(item)
        return items, at
    if kind == STATUS:
        return bytes(line), at
    if kind == ERROR:
        return _error(line.decode(errors="replace")), at
    raise InvalidResponse(f"Protocol error: {bytes(data[:100])!r}")


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
        self._unread = bytearray()

    def connect(self) -> None:
        """Open the connection. Raises redis-py's errors."""
        self._unread = bytearray()
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
        if not self._unread:
            data = self._read(4096)
            if (
                data[0] == INTEGER and data[1:-2].isdigit() and data[-2:] == b"\r\n"
            ):  # the reply to most calls for a lock
                return int(data[1:-2])
            self._unread += data
        while True:
            try:
                reply, end = parse(self._unread, 0)
                break
            except Incomplete as incomplete:
                self._unread += self._read(min(max(incomplete.missing, 4096, len(self._unread)), 1 << 20))
            except ValueError as error:
                raise InvalidResponse(f"Protocol error: {error}") from error
        del self._unread[:end]
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def _read(self, most: int) -> bytes:
        sock = self.connection._sock
        if sock is None:
            raise ConnectionError("The connection is closed.")
        try:
            data: bytes = sock.recv(most)
        except OSError as error:
            raise _told(error) from error
        if not data:
            raise ConnectionError("Connection closed by server.")
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

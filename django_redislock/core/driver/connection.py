"""Connections on which requests are sent and replies are read, by one thread at a time.

redis-py opens a connection, with its passwords, its TLS and its unix sockets. Its own way to send and to parse is made for
more than a lock needs, and costs a good part of a wake-up.
"""

from __future__ import annotations

import codecs
from builtins import TimeoutError as TimeoutError_
from typing import Any

from redis.exceptions import ConnectionError, InvalidResponse, NoScriptError, RedisError, ResponseError, TimeoutError

from .effects import Pipeline, ScriptBatch, ScriptCall
from .resp import INTEGER, Incomplete, Replies, pack

LEAST, MOST = 4096, 1 << 20
"""Bytes that are read at once: at first the least, then twice as many while the reads are full."""


# The first lookup of a host name imports this codec. If a signal handler looked up a name during the import, Python
# remembered that the codec does not exist, and no connection could be opened any more.
codecs.lookup("idna")


class RespConnection:
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


class ScriptConnection(RespConnection):
    """One connection on which scripts are called."""

    seated = False
    """Whether it is kept when it is given back."""
    era: object = None
    """Tells whether it was opened before the server was found to be no primary."""
    idle_since = 0.0
    """When it was last used."""

    def call(self, call: ScriptCall, sent: bool = False) -> Any:
        """Run the script and return its reply; `sent`: it has been sent by `send_ahead`.

        Any failure closes the connection, so that no reply is left behind.
        """
        try:
            if not sent:
                self.send(call.request)
            try:
                return self.receive()
            except NoScriptError:
                self.send(call.whole)
                return self.receive()
        except ResponseError:
            raise
        except ConnectionError:  # the call will be repeated, and an undo that arrives later would undo that
            self.close()
            raise
        except BaseException:
            self._abort(call)
            raise

    def send_ahead(self, call: ScriptCall) -> None:
        """Send the script, whose reply `call` returns. Raises ConnectionError also when the connection is not open."""
        if not self.open:
            raise ConnectionError("The connection is closed.")
        self.send(call.request)

    def call_all(self, calls: ScriptBatch) -> list[Any]:
        """Run the scripts and return their replies, an error in place of what was refused, as `call` does."""
        try:
            self.send(b"".join([call.request for call in calls.calls]))
            replies = [self._reply() for _ in calls.calls]
            unknown = [number for number, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if unknown:
                self.send(b"".join([calls.calls[number].whole for number in unknown]))
                for number in unknown:
                    replies[number] = self._reply()
            return replies
        except ConnectionError:
            self.close()
            raise
        except BaseException:
            self._abort(*calls.calls)
            raise

    def _reply(self) -> Any:
        try:
            return self.receive()
        except ResponseError as error:
            return error

    def ask(self, commands: Pipeline) -> list[Any]:
        """Send the commands and return their replies; any failure closes the connection."""
        try:
            self.send(b"".join([pack(*command) for command in commands.commands]))
            return [self.receive() for _ in commands.commands]
        except BaseException:
            self.close()
            raise

    def _abort(self, *calls: ScriptCall) -> None:
        """Close the connection, and have undone what the call may still do: on the same connection it comes after it."""
        try:
            for call in calls:
                if call.undo is not None and self.open:
                    self.send(call.undo().whole)
        except (RedisError, OSError):
            pass  # then the server never sees it, or is gone
        finally:
            self.close()


def _told(error: OSError) -> RedisError:
    """Return the error as redis-py calls it."""
    # The socket's own timeout, not the kernel's ETIMEDOUT, which ends the connection.
    if isinstance(error, TimeoutError_) and error.errno is None:
        return TimeoutError("Timeout on the socket")
    return ConnectionError(f"Connection lost: {error}")

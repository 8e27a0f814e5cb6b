"""A connection that one thread at a time uses.

redis-py opens it, with its passwords, TLS and unix sockets. From then on requests are sent and replies are read here,
because redis-py's own way is made for more than a lock needs, and takes a good part of the time of a wake-up.
"""

from __future__ import annotations

import codecs
import socket
import traceback
from builtins import TimeoutError as SocketTimeout
from typing import Any

from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, InvalidResponse, RedisError, ResponseError, TimeoutError
from redis.retry import Retry

from . import os_threads
from .effects import Pipeline, ScriptBatch, ScriptCall, with_text_once, without_frames
from .kinds import is_fake, is_of_provider, nameless, socket_of
from .resp import INTEGER, STATUS, Incomplete, Replies, encode_command

MIN_READ, MAX_READ = 4096, 1 << 20
"""Bytes of one read: at first the minimum, then twice as many as long as the reads are full."""


# The first lookup of a host name imports this codec. If a signal handler looked up a name during the import, Python
# remembered that the codec does not exist, and no connection could be opened any more.
codecs.lookup("idna")


class Connection:
    """A connection of redis-py, for scripts and commands or for a subscription."""

    pooled = False
    """Whether the pool keeps it when it is given back."""
    thread = 0
    """The thread that uses it, or used it last."""
    made_in: int | None = None
    """The thread of the operating system that opened it, where no other one can use its socket: gevent's belong to the
    hub of that thread."""
    era: object = None
    """The era of the pool in which it was opened."""
    idle_since = 0.0
    """The time of its last use."""

    def __init__(self, redis_connection: Any) -> None:
        self.redis_connection = redis_connection
        self._socket: socket.socket | None = socket_of(redis_connection)
        self._replies = Replies()
        self._read_size = MIN_READ
        self._unsent: bytes | memoryview = b""
        """The rest of the request that is being sent."""
        self._unanswered = False
        """Whether a reply to the last call may still come."""

    @property
    def open(self) -> bool:
        """Whether it is connected."""
        return self._socket is not None

    def connect(self) -> None:
        """Open the connection. Raises redis-py's errors."""
        self._replies = Replies()
        self.redis_connection.disconnect()  # `close` may have been interrupted, and `connect` would keep that socket
        try:
            self.redis_connection.connect()
        except Exception as error:
            clear_frames(error)
            if is_of_provider(error, self.redis_connection):
                self.redis_connection.disconnect()
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
            raise
        self._socket = socket_of(self.redis_connection)
        self.made_in = os_threads.system_ident() if os_threads.green_sockets() else None

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        self._socket = None
        self._unsent = b""
        self.redis_connection.disconnect()

    def execute(self, call: ScriptCall | ScriptBatch | Pipeline) -> Any:
        """Run a script, several scripts or commands, and return the reply or the replies.

        For several scripts the list contains an error in place of each refused reply. Raises the error of a refused
        script or command. Any other failure closes the connection, so that no reply is left on it.
        """
        replies: list[Any] = []
        try:
            self._begin()
            match call:
                case ScriptCall():
                    self.send(call.request)
                    reply = self.receive()
                    self._unanswered = False
                    return reply
                case ScriptBatch(calls):
                    self.send(b"".join([script_call.request for script_call in with_text_once(calls)]))
                    replies = [self.receive_any() for _ in calls]
                    self._unanswered = False
                    return replies
                case Pipeline(commands):
                    self.send(b"".join([encode_command(*command) for command in commands]))
                    replies = [self.receive_any() for _ in commands]
                    self._unanswered = False
        except ResponseError:
            self._unanswered = False
            raise
        except BaseException:
            self.close()
            raise
        for reply in replies:
            if isinstance(reply, ResponseError):
                try:
                    raise reply
                finally:
                    del reply, replies  # as in `receive`
        return replies

    def _begin(self) -> None:
        """Note that replies are to come. Those of another call may still come, if a handler raised before `_abort`: a
        grant that came late passed for the grant of the next caller's lock, which somebody else held."""
        if self._unanswered:
            self.close()
        self._unanswered = True

    def send_ahead(self, call: ScriptCall) -> None:
        """Send a script; `receive_for` returns its reply. Raises ConnectionError also when it is not open."""
        try:
            self._begin()
            if not self.open:
                raise ConnectionError("The connection is closed.")
            self.send(call.request)
        except BaseException:
            self.close()
            raise

    def receive_for(self, call: ScriptCall) -> Any:
        """Return the reply to a script that was sent ahead; failures are those of `execute`."""
        try:
            reply = self.receive()
            self._unanswered = False
            return reply
        except ResponseError:
            self._unanswered = False
            raise
        except BaseException:
            self.close()
            raise

    def send(self, request: bytes) -> None:
        """Send a request; connect first if necessary. Raises ConnectionError, TimeoutError, and errors of
        connecting."""
        sock = self._socket
        if sock is None:
            self.connect()
            sock = self._socket
        self._unsent = request
        try:
            # Not `sendall`, which does not say how much it has sent when it is interrupted.
            self._unsent = request[sock.send(request) :]  # type: ignore[union-attr]
            if self._unsent:
                self._send_rest(sock)
        except OSError as error:
            raise as_redis_error(error) from error

    def _send_rest(self, sock: Any) -> None:
        self._unsent = memoryview(self._unsent)
        while self._unsent:
            self._unsent = self._unsent[sock.send(self._unsent) :]

    def receive(self) -> Any:
        """Return the next reply; an error reply is raised.

        Raises ConnectionError, and TimeoutError when the socket's timeout has passed; the bytes that have arrived
        until then are kept for the next call.
        """
        at_start = self._replies.at_reply_start
        if at_start or self._replies.empty:
            data = self._read(1)
            # The reply to most calls is one line: an integer for a lock, a status for a slot of a semaphore.
            if at_start and data[-2:] == b"\r\n":
                line = data[1:-2]
                if data[0] == INTEGER and line.isdigit():
                    return int(line)
                if data[0] == STATUS and b"\r" not in line:
                    return line
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
            try:
                raise reply
            finally:
                # The error refers to this frame: in a cycle it would keep the connection open until the garbage
                # collector finds it.
                del reply
        return reply

    def receive_any(self) -> Any:
        """Return the next reply, or the error that the server answered."""
        try:
            return self.receive()
        except ResponseError as error:
            return without_frames(error)

    def _read(self, missing: int) -> bytes:
        sock = self._socket
        if sock is None:
            raise ConnectionError("The connection is closed.")
        if self.made_in is not None and self.made_in != os_threads.system_ident():
            raise ConnectionError("Its socket is patched, and belongs to another thread: it is opened anew here.")
        size = self._read_size if missing <= self._read_size else min(missing, MAX_READ)
        try:
            data = sock.recv(size)
        except OSError as error:
            raise as_redis_error(error) from error
        if not data:
            raise ConnectionError("Connection closed by server.")
        self._read_size = min(2 * size, MAX_READ) if len(data) == size else MIN_READ
        return data

    def set_timeouts(self, seconds: float, connecting: float) -> None:
        """Limit, from now on, each send and each read to so many seconds, and connecting to so many."""
        connection = self.redis_connection
        connection.socket_timeout, connection.socket_connect_timeout = seconds, connecting
        self.set_read_timeout(seconds)

    def set_read_timeout(self, seconds: float) -> None:
        """Limit each read to so many seconds, until the connection is closed."""
        if self._socket is not None:
            self._socket.settimeout(seconds)


class FakeConnection(Connection):
    """A connection of fakeredis, for tests: it has no socket, so redis-py's functions send and read."""

    _read_timeout = 5.0

    def send(self, request: bytes) -> None:
        if not self.open:
            self.connect()
        self.redis_connection.send_packed_command([request])

    def receive(self) -> Any:
        if not self.redis_connection.can_read(self._read_timeout):
            raise TimeoutError("No reply of fakeredis in time")
        return self.redis_connection.read_response(disable_decoding=True)

    def set_read_timeout(self, seconds: float) -> None:
        self._read_timeout = seconds


def new_connection(kind: Any, settings: dict[str, Any]) -> Connection:
    """Return a connection of this class of redis-py's with these settings, not connected yet."""
    of = FakeConnection if is_fake(kind) else Connection
    return of(kind(**settings, **nameless(kind), retry=Retry(NoBackoff(), 0)))


def clear_frames(error: BaseException) -> None:
    """Clear the variables of the frames that raised an error of redis-py, or the one that caused it.

    It raises the error from a variable, and so from a cycle with all callers: a lock that its last one had dropped was
    renewed until the garbage collector found it.
    """
    traceback.clear_frames(error.__traceback__)
    if error.__context__ is not None:
        traceback.clear_frames(error.__context__.__traceback__)


def as_redis_error(error: OSError) -> RedisError:
    """Return redis-py's exception for an error of a socket."""
    # The socket's own timeout, not the kernel's ETIMEDOUT, which ends the connection.
    if isinstance(error, SocketTimeout) and error.errno is None:
        return TimeoutError("Timeout on the socket")
    return ConnectionError(f"Connection lost: {error}")

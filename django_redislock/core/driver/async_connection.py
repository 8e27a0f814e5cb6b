"""A connection for asyncio, on which many requests are under way at once.

redis-py opens it, with its passwords, TLS and unix sockets. From then on the event loop hands each reply to the task
that waits for it. So no task reads, none has to be cancelled, and there is no pool to wait for.
"""

from __future__ import annotations

import asyncio
from builtins import TimeoutError as LoopTimeout
from collections import deque
from collections.abc import Callable, Coroutine
from copy import copy
from typing import Any

from redis.exceptions import ConnectionError, InvalidResponse, RedisError, TimeoutError

from . import idle
from .kinds import close_at_once, end_transport, transport_of
from .resp import Incomplete, NotPrimary, Replies

ANSWERED_WITHIN = 30.0
"""Seconds for which a connection that is to be closed waits for the replies to the other requests."""
GRACE = 0.02
"""Seconds for a loop that was blocked to read what has arrived meanwhile, before the server counts as silent."""


Pending = asyncio.Future[Any] | None
"""The future of a reply; None when no task waits for it."""


class AsyncConnection(asyncio.Protocol):
    """An open connection whose replies come in the order of the requests.

    It counts as silent when no byte has come for `patience` seconds, as the socket of a thread does: a large reply
    takes time.
    """

    def __init__(self, redis_connection: Any, patience: float, on_push: Callable[[Any], None] | None = None) -> None:
        """Take over a connection of redis-py; `on_push` is called with each reply that answers no request."""
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Done when the connection is closed, by either side."""
        self._redis_connection = redis_connection
        self._transport = transport_of(redis_connection)
        self._patience = patience
        self._on_push = on_push
        self._pending: deque[Pending] = deque()
        """Who waits for the replies, in the order of the requests."""
        self._unsent: deque[tuple[bytes, Pending]] = deque()
        """The requests that are being sent now."""
        self._sending = False
        self._replies = Replies()
        self._given_up = False
        self._abort_later: asyncio.TimerHandle | None = None
        self._received_at = self._loop.time()
        self._transport.set_protocol(self)

    @property
    def usable(self) -> bool:
        """Whether a new request may be sent: not after a time without one, as for `ConnectionPool.take`."""
        if self._given_up or self._transport.is_closing():
            return False
        in_use = self._pending or self._on_push is not None  # a subscription is checked by the waiting room
        return bool(in_use or self._loop.time() < self._received_at + idle.IDLE)

    @property
    def idle(self) -> bool:
        """Whether the server has answered all requests, also those that were given up and their undos."""
        return not self._pending

    async def request(self, request: bytes) -> Any:
        """Send the request and return the reply.

        Raises the error of an error reply, TimeoutError when the server stays silent, and ConnectionError.
        """
        if self._transport.is_closing():
            raise ConnectionError("The connection is closed.")
        loop = asyncio.get_running_loop()
        reply = loop.create_future()
        self._send(request, reply)
        timer = loop.call_later(self._patience, loop.call_later, GRACE, self._give_up, reply)
        try:
            return await reply
        finally:
            reply.cancel()  # of a coroutine that is closed; a cancelled task has done it
            if not reply.cancelled():  # silence counts also where each task gives up before
                timer.cancel()
            del reply  # it has the error, which refers to this frame

    def _send(self, request: bytes, pending: Pending) -> None:
        """Send the request, and expect its reply after those of the requests before it.

        With the two steps one after the other, a soft time limit between them gave each later task the reply of the
        task before it: a release's reply passed for a grant. A destructor that released a lock between them, too.
        """
        self._unsent.append((request, pending))
        if self._sending:  # a destructor: the call that it interrupted sends this
            return
        try:
            self._sending = True
            while self._unsent:
                request, pending = self._unsent.popleft()
                self._pending.append(pending)
                self._transport.write(request)
        except BaseException:
            self.abort()  # perhaps it was not written
            raise
        finally:
            self._sending = False

    def send_raw(self, data: bytes) -> None:
        """Send data that gets no reply in the order of the requests: what comes back goes to `on_push`."""
        self._transport.write(data)

    def close(self) -> None:
        """Send no new request, and close the connection when the server has answered the others, in bounded time."""
        self._given_up = True
        if self.idle:
            close_at_once(self._redis_connection)
        elif self._abort_later is None:
            self._abort_later = self._loop.call_later(self._patience + ANSWERED_WITHIN, self.abort)

    def abort(self) -> None:
        """Close the connection without sending the rest."""
        try:
            self._transport.abort()
        except RuntimeError:  # the loop is closed already, and cannot close the socket
            end_transport(self._transport)
        close_at_once(self._redis_connection)

    def _give_up(self, reply: asyncio.Future[Any]) -> None:
        """End this request with an error; the others may still get their replies, but no new request is sent here."""
        number = next((at for at, pending in enumerate(self._pending) if pending is reply), None)
        if number is None:  # it was answered
            return
        left = self._received_at + self._patience - self._loop.time()
        if left > 0:  # a part of a reply has arrived meanwhile
            self._loop.call_later(left, self._loop.call_later, GRACE, self._give_up, reply)
        else:
            self._pending[number] = None  # or it would keep the error, and so all its frames, until the connection ends
            self.close()
            if not reply.cancelled():
                reply.set_exception(TimeoutError(f"no reply within {self._patience:g} s"))

    # Called by the event loop

    def data_received(self, data: bytes) -> None:
        """Hand out the replies that are complete."""
        self._received_at = self._loop.time()
        self._replies.add(data)
        try:
            while not self._replies.empty:
                reply = self._replies.next()
                if isinstance(reply, NotPrimary):  # the other requests still get their replies
                    self.close()
                if self._pending:
                    _settle(self._pending.popleft(), reply)
                elif self._on_push is not None and not isinstance(reply, RedisError):
                    self._on_push(reply)
        except Incomplete:
            pass
        except (InvalidResponse, ValueError):
            self.abort()
        if self._given_up and self.idle:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """End all requests with an error."""
        reason = "Connection closed by server." if error is None else f"Connection lost: {error}"
        for pending in self._pending:
            _settle(pending, ConnectionError(reason))
        self._pending.clear()
        if self._abort_later is not None:
            self._abort_later.cancel()
        close_at_once(self._redis_connection)
        self.lost.set_result(None)


def _settle(pending: Pending, reply: Any) -> None:
    if pending is None or pending.done():
        return
    if isinstance(reply, RedisError):
        pending.set_exception(reply)
    else:
        pending.set_result(reply)


class SharedConnection:
    """A connection for all tasks: the first task opens it, and the others wait for `patience` seconds at most."""

    def __init__(self, connect: Callable[..., Coroutine[Any, Any, AsyncConnection]], patience: float) -> None:
        self._connect = connect
        self._patience = patience
        self._connection: AsyncConnection | None = None
        self._opening: asyncio.Future[Exception | None] | None = None

    @property
    def connection(self) -> AsyncConnection | None:
        """The connection, None when it is not open."""
        return self._connection if self._connection is not None and self._connection.usable else None

    async def open(self, *args: Any) -> AsyncConnection:
        """Return the connection, opened by `connect(*args)` if necessary. Raises redis-py's errors."""
        give_up: float | None = None
        while (connection := self.connection) is None:
            opening = self._opening
            if opening is None:
                try:
                    async with asyncio.timeout_at(give_up):  # after a wait for another task there is less time left
                        await self._open(*args)
                except LoopTimeout as error:
                    raise TimeoutError(f"no connection within {self._patience:g} s") from error
                continue
            loop = asyncio.get_running_loop()
            give_up = give_up or loop.time() + self._patience
            # Not the future itself, which would be cancelled together with one of the tasks.
            await asyncio.wait([opening], timeout=give_up - loop.time())
            if not opening.done():
                raise TimeoutError(f"no connection within {self._patience:g} s")
            failure = opening.result()
            if failure is not None:
                raise copy(failure)
        return connection

    async def _open(self, *args: Any) -> None:
        opening = asyncio.get_running_loop().create_future()
        failure = None
        try:
            self._opening = opening
            if self._connection is not None:
                self._connection.close()
            self._connection = await self._connect(*args)
        except (RedisError, OSError) as error:
            failure = copy(error)  # without its traceback, which leads to this frame
            raise
        finally:  # also when it is cancelled: then one of the waiting tasks opens it
            self._opening = None
            opening.set_result(failure)

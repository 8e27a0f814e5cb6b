"""A connection for asyncio on which many requests are under way at once.

redis-py opens it, with its passwords, its TLS and its unix sockets. From then on the loop hands what arrives to whoever
waits for it, so that there is no task that reads, nothing to cancel, and no pool to wait for.
"""

from __future__ import annotations

import asyncio
from builtins import TimeoutError as TimeoutError_
from collections import deque
from collections.abc import Callable, Coroutine
from copy import copy
from typing import Any

from redis.exceptions import ConnectionError, InvalidResponse, RedisError, ResponseError, TimeoutError

from .resp import Incomplete, NotPrimary, Replies

GRACE = 0.02
"""Seconds for a loop that was blocked to read what came meanwhile, before it calls the server silent."""


class AsyncConnection(asyncio.Protocol):
    """An open connection whose answers come in the order of the requests.

    It counts as silent when no byte has come for `patience` seconds, as for the socket of a thread: a large answer
    takes time.
    """

    def __init__(self, connection: Any, patience: float, hear: Callable[[Any], None] | None = None) -> None:
        """Take over a connection of redis-py; `hear` is told whatever answers no request."""
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Done when the connection is closed, by whomever."""
        self._connection = connection
        self._transport = connection._writer.transport
        self._patience = patience
        self._hear = hear
        self._asked: deque[asyncio.Future[Any] | None] = deque()
        self._replies = Replies()
        self._given_up = False
        self._heard_at = 0.0
        self._transport.set_protocol(self)

    @property
    def usable(self) -> bool:
        """Whether there is a point in asking."""
        return not self._given_up and not self._transport.is_closing()

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return all(answer is None or answer.done() for answer in self._asked)

    async def ask(self, request: bytes, undo: Callable[[], bytes] | None = None) -> Any:
        """Send the request and return the answer; when none comes, or nobody waits for it any more, send what undoes it.

        Raises what the server answers, TimeoutError when it does not in time, and ConnectionError.
        """
        if self._transport.is_closing():
            raise ConnectionError("The connection is closed.")
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._transport.write(request)
        self._asked.append(answer)
        timer = loop.call_later(self._patience, loop.call_later, GRACE, self._give_up, answer)
        try:
            return await answer
        except (ResponseError, ConnectionError, GeneratorExit):  # refused, or nothing can be sent any more
            raise
        except BaseException:
            if undo is not None:
                self.tell(undo())  # on the same connection it comes after what the request may still do
            raise
        finally:
            timer.cancel()
            self._close_when_idle()

    def tell(self, request: bytes) -> None:
        """Send the request, if that is possible still, and let nobody wait for the answer."""
        if not self._transport.is_closing():
            self._transport.write(request)
            self._asked.append(None)

    def say(self, request: bytes) -> None:
        """Send what is not a request: whatever comes back goes to `hear`."""
        self._transport.write(request)

    def close(self) -> None:
        """Close the connection when everything is sent."""
        self._connection._close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()
        self._connection._close()

    def _close_when_idle(self) -> None:
        if self._given_up and self.idle:
            self.close()

    def _give_up(self, answer: asyncio.Future[Any]) -> None:
        """End this request with an error; the others may still get an answer, but no new request is sent here."""
        if answer.done():
            return
        left = self._heard_at + self._patience - self._loop.time()
        if left > 0:  # a part of an answer has come meanwhile
            self._loop.call_later(left, self._loop.call_later, GRACE, self._give_up, answer)
        else:
            self._given_up = True
            answer.set_exception(TimeoutError(f"no answer within {self._patience:g} s"))

    # What the loop calls

    def data_received(self, data: bytes) -> None:
        """Hand out the answers that are complete."""
        self._heard_at = self._loop.time()
        self._replies.add(data)
        try:
            while not self._replies.empty:
                reply = self._replies.next()
                if isinstance(reply, NotPrimary):  # the others still get their answers
                    self._given_up = True
                if self._asked:
                    _settle(self._asked.popleft(), reply)
                elif self._hear is not None and not isinstance(reply, RedisError):
                    self._hear(reply)
        except Incomplete:
            pass
        except (InvalidResponse, ValueError):
            self.abort()
        self._close_when_idle()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell everybody."""
        reason = "Connection closed by server." if error is None else f"Connection lost: {error}"
        for answer in self._asked:
            _settle(answer, ConnectionError(reason))
        self._asked.clear()
        self._connection._close()
        self.lost.set_result(None)


def _settle(answer: asyncio.Future[Any] | None, reply: Any) -> None:
    if answer is None or answer.done():
        return
    if isinstance(reply, RedisError):
        answer.set_exception(reply)
    else:
        answer.set_result(reply)


class SharedConnection:
    """A line that is opened by the first who needs it, for all; nobody waits longer than `patience` seconds for others."""

    def __init__(self, connect: Callable[..., Coroutine[Any, Any, AsyncConnection]], patience: float) -> None:
        self._connect = connect
        self._patience = patience
        self._line: AsyncConnection | None = None
        self._opening: asyncio.Future[Exception | None] | None = None

    @property
    def line(self) -> AsyncConnection | None:
        """The line, if it is open."""
        return self._line if self._line is not None and self._line.usable else None

    async def open(self, *given: Any) -> AsyncConnection:
        """Return the line; raises redis-py's errors when it cannot be had. What is given goes to whatever connects."""
        give_up: float | None = None
        while (line := self.line) is None:
            opening = self._opening
            if opening is None:
                try:
                    async with asyncio.timeout_at(give_up):  # who waited for another one has less time left
                        await self._open(*given)
                except TimeoutError_ as error:
                    raise TimeoutError(f"no connection within {self._patience:g} s") from error
                continue
            loop = asyncio.get_running_loop()
            give_up = give_up or loop.time() + self._patience
            # Not the future itself, which would be cancelled with one of those who wait.
            await asyncio.wait([opening], timeout=give_up - loop.time())
            if not opening.done():
                raise TimeoutError(f"no connection within {self._patience:g} s")
            failure = opening.result()
            if failure is not None:
                raise copy(failure)
        return line

    async def _open(self, *given: Any) -> None:
        opening = self._opening = asyncio.get_running_loop().create_future()
        failure = None
        try:
            self._line = await self._connect(*given)
        except (RedisError, OSError) as error:
            failure = error
            raise
        finally:  # also cancelled: then one of those who wait opens it
            self._opening = None
            opening.set_result(failure)

"""The waiting room of an event loop's tasks: one subscription per server, for any number of waiters and locks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from redis.exceptions import ConnectionError, RedisError, ResponseError

from ..clock import monotonic
from . import idle
from .async_connection import AsyncConnection, SharedConnection
from .resp import encode_command
from .wakeups import POLL_INTERVAL, BaseWaitingRoom, Keepalive, Refusal, Waiter


class WaitingTask(Waiter):
    """A task that waits for one lock."""

    __slots__ = ("sleep",)

    def __init__(self, lock: bytes, id: bytes, channel: bytes) -> None:
        super().__init__(lock, id, channel)
        self.sleep: asyncio.Future[None] | None = None
        """Done when the sleep ends, None when the task does not sleep."""

    def interrupt(self) -> None:
        """End its sleep."""
        if self.sleep is not None and not self.sleep.done():
            self.sleep.set_result(None)


class AsyncWaitingRoom(BaseWaitingRoom[WaitingTask]):
    """All tasks of one event loop that wait for locks of one server, as threads do in a `WaitingRoom`."""

    def __init__(self, connect: Callable[..., Any], patience: float, refusal: Refusal) -> None:
        super().__init__(patience, refusal)
        self._connect = connect
        self._subscription = SharedConnection(self._subscribe, patience)
        self._keepalive = Keepalive()
        self._next_poll: asyncio.TimerHandle | None = None
        self._resubscribing: asyncio.Task[None] | None = None
        self._next_closing: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """Whether wake-ups arrive."""
        return self._subscription.connection is not None

    async def register(self, lock: bytes, id: bytes) -> WaitingTask:
        """Return a new waiter of the running task. Raises redis-py's errors when it cannot subscribe."""
        waiter = WaitingTask(lock, id, self.channel)
        self.admit(waiter)
        try:
            if not self.deaf:
                await self._subscription.open(waiter)
        except BaseException as error:
            if not (isinstance(error, (RedisError, OSError)) and self.deaf):
                self._waiters.remove(waiter)
                raise
        return waiter

    def admit(self, waiter: WaitingTask) -> None:
        """Take in a waiter, without subscribing."""
        waiter.room = self
        self._waiters.add(waiter)
        if self._next_poll is None:
            self._next_poll = asyncio.get_running_loop().call_later(POLL_INTERVAL, self._poll)

    def unregister(self, waiter: WaitingTask) -> None:
        """Remove the waiter."""
        self._waiters.remove(waiter)
        if not self._waiters:
            self._rest()

    def distrust(self) -> None:
        """Subscribe anew, at a primary: a call has found that the server is none."""
        self._distrusted = True
        connection = self._subscription.connection
        if connection is not None:
            connection.close()

    def _rest(self) -> None:
        """Stop polling while there is no waiter, and close the subscription when there was none for a minute."""
        if self._next_poll is not None:
            self._next_poll.cancel()
            self._next_poll = None
        self._last_waited = monotonic()
        if self._next_closing is None:
            self._next_closing = asyncio.get_running_loop().call_later(idle.IDLE, self._close_idle)

    def _close_idle(self) -> None:
        self._next_closing = None
        left = self._last_waited + idle.IDLE - monotonic()
        connection = self._subscription.connection
        if self._waiters or connection is None:  # the last waiter to leave starts the timer again
            return
        if left > 0:
            self._next_closing = asyncio.get_running_loop().call_later(left, self._close_idle)
        else:
            connection.close()

    async def wait(self, waiter: WaitingTask, until: float, poll_at: float) -> bytes | None:
        """Sleep until the waiter is woken, until this time on the monotonic clock at most; return the message, if any.

        The waiter that polls for the lock sleeps until `poll_at` at most.
        """
        if poll_at < until and self._waiters.polls(waiter):
            until = poll_at
        looks = self.deaf
        if looks:
            until = min(until, waiter.next_look())
        elif not waiter.woken and not self.open:
            until = await self._resubscribe(until)
        if not waiter.woken:
            loop = asyncio.get_running_loop()
            waiter.sleep = loop.create_future()
            timer = loop.call_later(until - monotonic(), waiter.interrupt)
            try:
                await waiter.sleep
            finally:
                timer.cancel()
                waiter.sleep = None
        if looks:
            waiter.woken = True
        return waiter.take_message()

    async def _resubscribe(self, until: float) -> float:
        """Subscribe anew, and return until when to sleep then: not for long without a subscription.

        A task of its own does it, because it may take longer than the waiters may sleep without polling.
        """
        if self._resubscribing is None or self._resubscribing.done():
            self._resubscribing = asyncio.get_running_loop().create_task(self._subscribe_anew())
        resubscribing = self._resubscribing
        await asyncio.wait([resubscribing], timeout=min(POLL_INTERVAL, until - monotonic()))
        if self.open:
            return until
        return min(until, monotonic() + POLL_INTERVAL * resubscribing.done())

    async def _subscribe_anew(self) -> None:
        # The scripts that the waiters call report what is wrong with the server.
        with suppress(RedisError, OSError):
            await self._subscription.open()

    def _poll(self) -> None:
        connection = self._subscription.connection
        if connection is not None:
            try:
                if self._keepalive.ping_due():
                    connection.send_raw(encode_command(b"PING"))
            except ConnectionError:
                connection.abort()
        if not self.deaf:
            self._waiters.wake_pollers()
        if not self._waiters:  # those that were left had been interrupted
            self._rest()
            return
        self._next_poll = asyncio.get_running_loop().call_later(POLL_INTERVAL, self._poll)

    def _on_push(self, reply: Any) -> None:
        self._keepalive.received()
        self._waiters.dispatch(reply)

    async def _subscribe(self, waiter: WaitingTask | None = None) -> AsyncConnection:
        try:
            connection: AsyncConnection = await self._connect(self._on_push)
        except (RedisError, OSError) as error:
            self._note_failure(error)
            raise
        self._keepalive = Keepalive()
        try:
            with closing(self._subscribing()) as requests:
                request = next(requests)
                while True:
                    try:
                        reply = await connection.request(request)
                    except ResponseError as error:
                        reply = error
                    request = requests.send(reply)
        except StopIteration:
            pass
        except BaseException as error:
            connection.abort()
            if isinstance(error, (RedisError, OSError)):
                self._note_failure(error)
            raise
        connection.lost.add_done_callback(lambda _: self._waiters.wake_all())
        self._waiters.wake_all(but=waiter)  # messages that were sent meanwhile are lost
        return connection

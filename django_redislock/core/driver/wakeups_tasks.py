"""The waiting room of an event loop: one subscription per server, however many tasks wait for however many locks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from redis.exceptions import ConnectionError, RedisError, ResponseError

from ..clock import monotonic
from . import idle
from .async_connection import AsyncConnection, SharedConnection
from .resp import HELLO, check_role, pack
from .wakeups import LOOK_EVERY, Keepalive, Waiter, Waiters, new_channel


class WaitingTask(Waiter):
    """One task that waits for one lock."""

    __slots__ = ("alarm",)

    def __init__(self, lock: bytes, id: bytes, channel: bytes) -> None:
        super().__init__(lock, id, channel)
        self.alarm: asyncio.Future[None] | None = None

    def stir(self) -> None:
        """End its sleep."""
        if self.alarm is not None and not self.alarm.done():
            self.alarm.set_result(None)


class AsyncWaitingRoom:
    """All tasks of one event loop that wait for locks of one server, as threads do in a `WaitingRoom`."""

    def __init__(self, connect: Callable[..., Any], patience: float) -> None:
        self.channel = new_channel()
        self._connect = connect
        self._subscription = SharedConnection(self._subscribe, patience)
        self._waiters: Waiters[WaitingTask] = Waiters()
        self._pulse = Keepalive()
        self._next_look: asyncio.TimerHandle | None = None
        self._mending: asyncio.Task[None] | None = None
        self._distrusted = False
        self._left = 0.0
        self._next_closing: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """Whether wake-ups arrive."""
        return self._subscription.line is not None

    async def join(self, lock: bytes, id: bytes) -> WaitingTask:
        """Enter; raises redis-py's errors when the subscription cannot be had."""
        waiter = WaitingTask(lock, id, self.channel)
        self._waiters.add(waiter)
        try:
            await self._subscription.open(waiter)
        except BaseException:
            self._waiters.remove(waiter)
            raise
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_EVERY, self._look)
        return waiter

    def distrust(self) -> None:
        """Subscribe anew, and at a primary: a call has found that the server is none any more."""
        self._distrusted = True
        line = self._subscription.line
        if line is not None:
            line.close()

    def leave(self, waiter: WaitingTask) -> None:
        """Leave."""
        self._waiters.remove(waiter)
        if not self._waiters:
            self._rest()

    def _rest(self) -> None:
        """Look no more while nobody waits, and close the subscription when nobody has waited for a minute."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        self._left = monotonic()
        if self._next_closing is None:
            self._next_closing = asyncio.get_running_loop().call_later(idle.IDLE, self._close_idle)

    def _close_idle(self) -> None:
        self._next_closing = None
        left = self._left + idle.IDLE - monotonic()
        line = self._subscription.line
        if self._waiters or line is None:  # the last to leave sees to it
            return
        if left > 0:
            self._next_closing = asyncio.get_running_loop().call_later(left, self._close_idle)
        else:
            line.close()

    async def wait(self, waiter: WaitingTask, until: float, look: float) -> bytes | None:
        """Sleep until the waiter is woken, at most until this time on the monotonic clock; return what it was told.

        The first waiter for a lock sleeps until `look` at most.
        """
        if look < until and self._waiters.is_first(waiter):
            until = look
        if not waiter.woken and not self.open:
            until = await self._mend(until)
        if not waiter.woken:
            loop = asyncio.get_running_loop()
            waiter.alarm = loop.create_future()
            timer = loop.call_later(until - monotonic(), waiter.stir)
            try:
                await waiter.alarm
            finally:
                timer.cancel()
                waiter.alarm = None
        return waiter.heed()

    async def _mend(self, until: float) -> float:
        """Subscribe anew, and return how long to sleep then: not for long without a subscription.

        A task does it, because it may take longer than the waiters are to sleep without a look.
        """
        if self._mending is None or self._mending.done():
            self._mending = asyncio.get_running_loop().create_task(self._subscribe_anew())
        mending = self._mending
        await asyncio.wait([mending], timeout=min(LOOK_EVERY, until - monotonic()))
        if self.open:
            return until
        return min(until, monotonic() + LOOK_EVERY * mending.done())

    async def _subscribe_anew(self) -> None:
        # The scripts that the waiters call say what is wrong with the server.
        with suppress(RedisError, OSError):
            await self._subscription.open()

    def _look(self) -> None:
        line = self._subscription.line
        if line is not None:
            try:
                if self._pulse.check():
                    line.say(pack(b"PING"))
            except ConnectionError:
                line.abort()
        self._waiters.wake_first()
        if not self._waiters:  # those who were left were interrupted
            self._rest()
            return
        self._next_look = asyncio.get_running_loop().call_later(LOOK_EVERY, self._look)

    def _hear(self, reply: Any) -> None:
        self._pulse.beat()
        self._waiters.hear(reply)

    async def _subscribe(self, waiter: WaitingTask | None = None) -> AsyncConnection:
        line: AsyncConnection = await self._connect(self._hear)
        self._pulse = Keepalive()
        distrusted, self._distrusted = self._distrusted, False
        try:
            if distrusted:
                with suppress(ResponseError):
                    check_role(await line.ask(HELLO))
            await line.ask(pack(b"SUBSCRIBE", self.channel))
        except BaseException:
            self._distrusted = self._distrusted or distrusted
            line.close()
            raise
        line.lost.add_done_callback(lambda _: self._waiters.wake_all())
        self._waiters.wake_all(but=waiter)  # what was said meanwhile went unheard
        return line

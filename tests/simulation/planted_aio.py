"""Defects of the driver of asyncio, planted as those of `planted` are."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Any

from django_redislock.core import attempt
from django_redislock.core.driver import async_connection, wakeups, wakeups_tasks

from .patches import Defect

Connection, Room = async_connection.AsyncConnection, wakeups_tasks.AsyncWaitingRoom
_wait, _new_connection = Room.wait, Connection.__init__
_wake_all = wakeups.Waiters.wake_all


async def _sleeps_anyway(self: Any, waiter: Any, until: float, poll_at: float) -> Any:
    waiter.woken = False
    return await _wait(self, waiter, until, poll_at)


async def _polls_only(self: Any, waiter: Any, until: float, poll_at: float) -> Any:
    return await _wait(self, waiter, until, math.inf)


def _wakes_the_others(self: Any, but: Any = None) -> None:
    if but is not None:
        _wake_all(self, but)


class _Stack(deque[Any]):
    popleft = deque.pop


def _answers_the_last(self: Any, *args: Any) -> None:
    _new_connection(self, *args)
    self._pending = _Stack()


async def _opens_for_itself(self: Any, *args: Any) -> None:
    opening = self._opening = asyncio.get_running_loop().create_future()
    self._connection = await self._connect(*args)
    self._opening = None
    opening.set_result(None)


ASYNCIO: dict[str, Defect] = {
    "a wake-up before the sleep is lost": (Room, "wait", _sleeps_anyway),
    "a task does not look when the lock expires": (Room, "wait", _polls_only),
    "a lost subscription wakes nobody": (wakeups.Waiters, "wake_all", _wakes_the_others),
    "a message wakes no task": (wakeups.Waiters, "dispatch", lambda self, reply: None),
    "a reply goes to the task that asked last": (Connection, "__init__", _answers_the_last),
    "a task that is cancelled while it connects keeps the others from it": (
        async_connection.SharedConnection,
        "_open",
        _opens_for_itself,
    ),
    "a task that is cancelled gives nothing back": (attempt.Attempt, "give_up", lambda self: None),
    "nobody polls": (Room, "_poll", lambda self: None),
}

NOT_FOUND: dict[str, tuple[str, Defect]] = {
    # It is closed some seconds later in any case, and a call may take three socket timeouts.
    "a connection without replies is used again": (
        "asyncio",
        (Connection, "usable", property(lambda self: not self._transport.is_closing())),
    )
}

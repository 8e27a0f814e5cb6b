from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import GeneratorType
from typing import TypeVar

from django_redislock.core.driver import registry, server

T = TypeVar("T")

monotonic = partial(time.monotonic)  # freezegun replaces each reference to a function of `time`

BUSY = 1.5
"""Seconds that a busy machine may add to the bound of a promise. What a test looks for takes longer, or for ever."""


patience = 60.0
"""Seconds until a test gives up, if it does not say. The quick part gives up sooner, to be red soon."""


def wait_until(condition: Callable[[], T], timeout: float | None = None, message: str | Callable[[], str] = "") -> T:
    """Return the first true answer of `condition`; AssertionError when there is none within `timeout` seconds.

    A message that tells how things stand in the end is a function.
    """
    timeout = patience if timeout is None else timeout
    deadline = monotonic() + timeout
    while True:
        answer = condition()
        if answer:
            return answer
        if monotonic() > deadline:
            what = message() if callable(message) else message
            raise AssertionError(f"Not within {timeout} s: {what or condition}; the last answer was {answer!r}")
        time.sleep(0.01)


def freeze(pid: int) -> None:
    """Stop the process, and return when each of its threads stands still.

    The others go on until one of them has got the signal: on a busy machine for long enough to take the lock that the
    test releases next, and to hold it while it is frozen.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: threads_are(pid, "Tt"))


def threads_are(pid: int, states: str) -> bool:
    """Whether each thread of the process is in one of these states, or has ended."""
    return all(_state(stat) in f"{states}ZX" for stat in Path(f"/proc/{pid}/task").glob("*/stat"))


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def lived(seconds: float) -> None:
    """Let so much of a lock's life pass."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, timeout=seconds + 5)


async def until(condition: Callable[[], object], timeout: float = 10) -> None:
    """Wait for the condition, and let the other tasks run meanwhile."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"Not within {timeout} s: {condition}"
        await asyncio.sleep(0.005)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The body must not take longer: a bound that a promise names."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds + BUSY


def wait_until_collected(loop: asyncio.AbstractEventLoop) -> None:
    """Forget a closed loop and wait until its transports are gone: Python's warnings may not come in another test."""
    transports = weakref.WeakSet[asyncio.Transport]()
    # The servers of clients besides, because objects that were frozen out of the collections are not among those found.
    for found in [*gc.get_objects(), *list(registry._by_pool.values())]:
        kind = type(found)  # isinstance() would wake Django's lazy objects
        if issubclass(kind, asyncio.Transport) and getattr(found, "_loop", None) is loop:
            transports.add(found)
        elif issubclass(kind, server.Server):
            found.views.pop(loop, None)
    del found

    def are_gone() -> bool:
        gc.collect()
        return not transports

    wait_until(are_gone, message=lambda: f"{[gc.get_referrers(each) for each in list(transports)]}")


def destroy_generators(name: str) -> None:
    """Destroy the suspended generators of this name, as the garbage collector may before the coroutines above them."""
    for found in gc.get_objects():
        if type(found) is GeneratorType and found.__name__ == name and found.gi_frame is not None:
            with suppress(RuntimeError):
                found.close()

"""`leader()` and `Leader`: one of all processes leads, and the next one follows when it ends."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from ..core import chance
from ..core.acquirers import Block, forget, left_by
from ..core.async_lock import AsyncLock, coroutine_function, current_task
from ..core.clock import monotonic
from ..core.driver.effects import Operation, Sleep, WaitForWakeup, advice_for, is_temporary
from ..core.driver.os_threads import event
from ..core.lease import calling_thread
from ..core.lock import Lock
from ..core.validation import MAX_SECONDS, Seconds
from ..exceptions import LockBackendError, LockError, NotAcquired
from ..locks import alock, lock

SLICE = 1.0
"""Seconds after which a candidate checks whether it was stopped, and a leader whether its term was lost."""
ELECTION_PAUSE = 0.5, 1.0
"""Seconds between two tries of a candidate while Redis cannot serve it, chosen at random in between."""


class Election:
    """What `leader` returns: ``with`` and ``async with`` block until this process leads, and resign in the end.

    Several threads and tasks may use one object: each enters and leaves a term of its own.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self._name = name
        self._options = options | {"max_hold": MAX_SECONDS, "auto_renewal": True, "kind": "leader"}
        self.new_term()  # bad arguments raise here
        self._blocks: list[Block] = []
        """The blocks of threads and tasks, each with its term."""

    def new_term(self, **options: Any) -> Lock:
        """Return the lock of a term that may begin."""
        return lock(self._name, until_commit=False, **self._options | options)

    def new_async_term(self, **options: Any) -> AsyncLock:
        """Return the lock of a term that may begin, for asyncio."""
        return alock(self._name, **self._options | options)

    def __enter__(self) -> Lock:
        term = self.new_term()
        acquirer = term._acquirer()
        block = Block(acquirer, sys._getframe(1), term)
        try:
            elect(term, lambda: False)
            self._blocks.append(block)
            return term
        except BaseException:  # perhaps of a signal handler, after the election
            forget(self._blocks, block)
            term._take_back(acquirer, (None, 0))
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block = None
        try:  # from the first line on: a handler may raise before the release is sent
            block = self._left_by(calling_thread(), sys._getframe(1))
            block.held._end_block(block.acquirer, kind, error, trace)
        except LockError:
            raise
        except BaseException:
            block = block or self._left_by(calling_thread(), sys._getframe(1))
            block.held._exit_interrupted(block.acquirer)
            raise
        finally:  # not sooner: what a handler interrupts has to find the block again
            if block is not None:
                try:
                    forget(self._blocks, block)
                except BaseException:  # of a handler: each such end left one more block
                    forget(self._blocks, block)
                    raise

    def _left_by(self, acquirer: Any, frame: FrameType) -> Block:
        block = left_by(self._blocks, acquirer, frame)
        if block is None:
            raise NotAcquired(self._name)
        return block

    @coroutine_function
    def __aenter__(self) -> Coroutine[Any, Any, AsyncLock]:
        return self._aenter(sys._getframe(1))

    async def _aenter(self, frame: FrameType) -> AsyncLock:
        term = self.new_async_term()
        await aelect(term, lambda: False)
        self._blocks.append(Block(term._acquirer(), frame, term))
        return term

    @coroutine_function
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        return self._aexit(sys._getframe(1), error)

    async def _aexit(self, frame: FrameType, error: BaseException | None) -> None:
        block = self._left_by(current_task(), frame)
        forget(self._blocks, block)
        await block.held._end_block(block.acquirer, None, error)


def leader(
    name: str,
    *,
    expire: Seconds | None = None,
    label: str | None = None,
    on_lost: Callable[[Any], object] | None = None,
    using: str | None = None,
) -> Election:
    """Wait until this process is the leader of this name: ``with leader("scheduler") as term: ...``, or ``async with``.

    The term is the held lock `name`: `term.fence` grows with each term, `term.lost` says why the term ended early, and
    `term.raise_if_lost()` raises LockLost. A process that ends its block hands over at once; the term of one that was
    killed ends by its `expire`. `expire`, `label`, `on_lost` and `using` are those of `lock`. The term is renewed for
    as long as the process lives, whatever ``MAX_HOLD`` says.

    While Redis does not answer, or refuses for a time (it is full or busy), the wait goes on. Raises
    LockBackendError when Redis refuses for good, as without permissions, and at the end of the block LockLost when the
    term was lost.
    """
    return Election(name, expire=expire, label=label, on_lost=on_lost, using=using)


class Leader:
    """A candidate that is elected again and again, until it is stopped.

    `on_elected(term)` starts what a leader does, and returns; `on_lost(term)` stops it, when the term was lost
    (`term.lost` says why) and when the candidate is stopped, before the next leader is elected. Both run in the thread
    or task of `run` or `arun`; for `arun` they may be coroutine functions. An `on_elected` that does not return notices
    the end of its term by `term.lost` only. Who was asked to step down (`Lock.recall`) does not stand again for one
    `expire`, so that another one leads. The term and the other arguments are those of `leader`.
    """

    def __init__(
        self,
        name: str,
        *,
        on_elected: Callable[[Any], object],
        on_lost: Callable[[Any], object] | None = None,
        expire: Seconds | None = None,
        label: str | None = None,
        using: str | None = None,
    ) -> None:
        if not callable(on_elected):
            raise TypeError("on_elected must be a function")
        if on_lost is not None and not callable(on_lost):
            raise TypeError("on_lost must be a function")
        self.name = name
        self._on_elected = on_elected
        self._on_lost = on_lost
        self._election = Election(name, expire=expire, label=label, using=using)
        self._stopped = False
        self._wakes: set[Callable[[], object]] = set()
        """The functions that wake the threads and tasks that lead."""

    def stop(self) -> None:
        """End the term, if there is one, and the candidacy; from any thread, or from a signal handler."""
        self._stopped = True
        for wake in list(self._wakes):
            wake()

    def run(self) -> None:
        """Stand for election until `stop`. Raises the errors of the functions, after it has handed over."""
        for function in (self._on_elected, self._on_lost):
            if inspect.iscoroutinefunction(function):
                raise TypeError(f"{function!r} is a coroutine function: await arun() instead of run()")
        while not self._stopped:
            # A signal handler may set this event. It could wait for itself in a threading.Event.
            woken = event()
            wake = woken.set
            term = self._election.new_term(on_lost=lambda _, wake=wake: wake())
            try:  # around the election, because a signal handler may raise as soon as the term has begun
                if not elect(term, lambda: self._stopped):
                    return
                self._wakes.add(wake)
                try:
                    self._on_elected(term)
                    while not self._stopped and not term.lost:
                        woken.wait(SLICE)  # a greenlet is not woken by the watchdog, which is a real thread
                finally:
                    if self._on_lost is not None:
                        self._on_lost(term)
            finally:
                self._wakes.discard(wake)
                with suppress(LockError):  # the error is logged, and the term ends by its expiry
                    term.release()
            if was_recalled(term):
                self._sit_out(term.expire)

    def _sit_out(self, seconds: float) -> None:
        woken, until = event(), monotonic() + seconds
        wake = woken.set
        self._wakes.add(wake)
        try:
            while not self._stopped and (left := until - monotonic()) > 0:
                woken.wait(min(left, SLICE))
        finally:
            self._wakes.discard(wake)

    async def arun(self) -> None:
        """Stand for election until `stop` or until the task is cancelled.

        Raises the errors of the functions, after it has handed over.
        """
        loop = asyncio.get_running_loop()
        while not self._stopped:
            woken: asyncio.Queue[Any] = asyncio.Queue()
            wake = partial(loop.call_soon_threadsafe, woken.put_nowait, None)
            term = self._election.new_async_term(on_lost=woken.put_nowait)
            try:
                if not await aelect(term, lambda: self._stopped):
                    return
                self._wakes.add(wake)
                try:
                    await _awaited(self._on_elected(term))
                    if not self._stopped and not term.lost:
                        await woken.get()
                finally:
                    if self._on_lost is not None:
                        await _awaited(self._on_lost(term))
            finally:
                self._wakes.discard(wake)
                with suppress(LockError):
                    await term.release()
            if was_recalled(term):
                await self._asit_out(term.expire)

    async def _asit_out(self, seconds: float) -> None:
        woken = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set)
        self._wakes.add(wake)
        try:
            if not self._stopped:
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), seconds)
        finally:
            self._wakes.discard(wake)


def was_recalled(term: Lock | AsyncLock) -> bool:
    """Return whether the leader was asked to step down: then it lets another one lead for a while."""
    return term.lost is not None and term.lost.code == "recalled"


class Stopped(BaseException):
    """Ends the wait of a candidate that was stopped."""


def elect(term: Lock, stopped: Callable[[], bool]) -> bool:
    """Return whether the term began before the candidate was stopped. Raises LockBackendError when Redis refuses
    for good."""
    return term._server.run(_elect(term, term._acquirer(), stopped))


async def aelect(term: AsyncLock, stopped: Callable[[], bool]) -> bool:
    """Do what `elect` does, in a task."""
    return await term._run(lambda acquirer: _elect(term, acquirer, stopped))


def _elect(term: Lock | AsyncLock, acquirer: Any, stopped: Callable[[], bool]) -> Operation[bool]:
    while not stopped():
        try:
            return (yield from _until_stopped(term._acquire(acquirer, None), stopped))
        except Stopped:
            break
        except LockBackendError as error:
            if refused_for_good(error):
                raise
        yield Sleep(chance.uniform(*ELECTION_PAUSE))
    return False


def refused_for_good(error: LockBackendError) -> bool:
    """Return whether another try would be refused, too, until somebody changes the configuration."""
    return (error.refused and not is_temporary(error.__cause__)) or bool(advice_for(error.cause))


def _until_stopped(acquire: Operation[bool], stopped: Callable[[], bool]) -> Operation[bool]:
    """Do what the operation does, and throw Stopped into its wait soon after the candidate was stopped.

    It is one acquisition all the time, so that the candidate keeps its place in the queue.
    """
    result: Any = None
    error: BaseException | None = None
    try:
        while True:
            try:
                effect = acquire.send(result) if error is None else acquire.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            waits = isinstance(effect, (WaitForWakeup, Sleep))  # Sleep: Redis is away, with Sentinel for 40 seconds
            if isinstance(effect, WaitForWakeup):
                effect = effect._replace(until=min(effect.until, monotonic() + SLICE))
            result = error = None
            try:
                result = yield effect
            except BaseException as raised:
                error = raised
            if waits and error is None and stopped():
                error = Stopped()
    finally:
        del error  # it refers to this frame


async def _awaited(result: Any) -> None:
    if inspect.isawaitable(result):
        await result

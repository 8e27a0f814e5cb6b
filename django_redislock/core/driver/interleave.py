"""Many operations side by side: their calls share one round trip, and their waits run at the same time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any, Generic

from redis.exceptions import RedisError

from ..clock import monotonic
from .effects import Effect, Operation, ScriptBatch, ScriptCall, Sleep, Subscribe, T, WaitForWakeup
from .wakeups import POLL_INTERVAL


class Abandoned(BaseException):
    """Thrown into operations whose result is not needed any more."""


def interleave(
    operations: Sequence[Operation[T]],
    results: dict[int, T],
    before_waiting: Callable[[], Operation[bool]] | None = None,
) -> Operation[None]:
    """Run many operations side by side; `results` gets the result of each, by its number.

    The operation of `before_waiting` runs whenever all others only wait; once its result is False, the others are
    abandoned. Raises the error of that operation, or the first error of the others, when all have ended.
    """
    # One function, because each of its branches yields: split, an error or a GeneratorExit would leave two generators,
    # and the garbage collector may destroy the outer one first, whose place in a queue then stayed.
    if len(operations) == 1 and before_waiting is None:  # the most frequent case
        results[0] = yield from operations[0]
        return
    group = _Group(operations, results)
    for number in range(len(operations)):
        group.proceed(number)
    try:
        while group.runs():
            if group.has_work():
                yield from group.work()
                continue
            if before_waiting is not None:
                try:
                    go_on = yield from before_waiting()
                except BaseException as error:
                    group.failure, go_on = group.failure or error, False
                if not go_on:
                    before_waiting = None
                    group.abandon()
                    continue
            yield from group.wait()
    finally:
        if group.waiter is not None:
            group.waiter.leave()
    failure, group.failure = group.failure, None
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # it refers to this frame: in a cycle it would keep the locks of all callers


class _Group(Generic[T]):
    """The next effect of each of the operations."""

    def __init__(self, operations: Sequence[Operation[T]], results: dict[int, T]) -> None:
        self._operations = operations
        self._results = results
        self.failure: BaseException | None = None
        self._calls: dict[int, ScriptCall] = {}
        self._pauses: dict[int, Sleep] = {}
        self._subscribes: dict[int, Subscribe] = {}
        self._waits: dict[int, WaitForWakeup] = {}
        self._others: dict[int, Effect] = {}
        self._by_kind: dict[type, dict[int, Any]] = {
            ScriptCall: self._calls,
            Sleep: self._pauses,
            Subscribe: self._subscribes,
            WaitForWakeup: self._waits,
        }
        self._effects: list[dict[int, Any]] = [*self._by_kind.values(), self._others]
        self.waiter: Any = None
        """The waiter that sleeps for all of them."""
        self._lock = b""
        self._new: list[int] = []
        """The numbers of the waits for which it does not sleep yet."""
        self._numbers: dict[Any, int] = {}
        """The numbers, by the waiters for which it sleeps."""
        self._until = math.inf
        """The time at which the first of them continues without a wake-up, or an earlier time."""

    def runs(self) -> bool:
        """Whether not all have ended."""
        return any(self._effects)

    def has_work(self) -> bool:
        """Whether one of them does not only wait."""
        return bool(self._others or (self._calls and not (self._subscribes or self._pauses)))

    def proceed(self, number: int, result: Any = None, error: BaseException | None = None) -> None:
        """Continue one of them."""
        operation = self._operations[number]
        for effects in self._effects:
            effects.pop(number, None)
        try:
            effect = operation.send(result) if error is None else operation.throw(error)
        except StopIteration as stop:
            self._results[number] = stop.value
        except Abandoned:
            pass
        except BaseException as raised:
            self.failure = self.failure or raised
        else:
            self._by_kind.get(type(effect), self._others)[number] = effect
            if isinstance(effect, WaitForWakeup):
                self._new.append(number)
        finally:
            del error, result  # as in `interleave`

    def abandon(self) -> None:
        """End all of them."""
        for number in self._running():
            self.proceed(number, error=Abandoned())

    def work(self) -> Operation[None]:
        """Yield the effect of one, or all calls in one batch."""
        if self._others:
            number, effect = next(iter(self._others.items()))
            yield from self._do([number], effect)
        else:
            yield from self._do(list(self._calls), ScriptBatch(tuple(self._calls.values())))

    def wait(self) -> Operation[None]:
        """Subscribe, pause, or sleep until a wake-up."""
        if self._subscribes:
            number, subscribe = next(iter(self._subscribes.items()))
            # They register as if for one lock: one polls twice a second, each of the others when its lock expires.
            self._lock = self._lock or subscribe.lock
            yield from self._do([number], subscribe._replace(lock=self._lock, of=subscribe.lock))
        elif self._pauses:
            longest = max(pause.seconds for pause in self._pauses.values())
            yield from self._do(list(self._pauses), Sleep(longest))
        else:
            yield from self._sleep()

    def _sleep(self) -> Operation[None]:
        """Sleep until one of them is woken, or its time is over."""
        if self.waiter is None:
            first = next(iter(self._waits.values())).waiter
            try:
                self.waiter = yield Subscribe(first.lock, first.id + b"+")
            except RedisError:  # there will be no wake-ups now
                yield from self._do(list(self._waits), Sleep(POLL_INTERVAL))
                return
            self.waiter.woken_members = deque()
        woken = self.waiter.woken_members
        self._admit_new(woken)
        if not woken:
            yield from self._do([], WaitForWakeup(self.waiter, self._until, math.inf))
        while woken:
            waiter = woken.popleft()
            if waiter.woken and self._numbers[waiter] in self._waits:
                self.proceed(self._numbers[waiter], waiter.take_message())
        if monotonic() >= self._until:
            self._proceed_with_overdue(monotonic())

    def _admit_new(self, woken: deque[Any]) -> None:
        """Let the waiters that have begun to wait since the last sleep be woken through the group's own one."""
        while self._new:
            number = self._new.pop()
            if number in self._waits:
                waiter, until, poll_at = self._waits[number]
                self._until = min(self._until, until, poll_at)
                self._numbers[waiter] = number
                waiter.group = self.waiter
                if waiter.woken:  # it was woken before it had a group
                    woken.append(waiter)

    def _proceed_with_overdue(self, now: float) -> None:
        """Proceed with the operations whose time is over, and note when the next one's is."""
        self._until = math.inf
        for number, (waiter, until, poll_at) in list(self._waits.items()):
            if min(until, poll_at) <= now:
                self.proceed(number, waiter.take_message())
            else:
                self._until = min(self._until, until, poll_at)

    def _running(self) -> list[int]:
        return [number for effects in self._effects for number in effects]

    def _do(self, numbers: list[int], effect: Effect) -> Operation[None]:
        """Yield the effect for these operations; an error that is not Redis's interrupts all of them."""
        replies: list[Any] = []
        result: Any = None
        reply: Any = None
        error: BaseException | None = None
        try:
            result = yield effect
            replies = result if isinstance(effect, ScriptBatch) else [result]
        except BaseException as raised:
            error = raised
            if not isinstance(error, RedisError):
                numbers = self._running()
        try:
            for number, reply in zip(numbers, chain(replies, repeat(None)), strict=False):
                self.proceed(number, reply, error or (reply if isinstance(reply, RedisError) else None))
        finally:
            del error, result, replies, reply  # as in `interleave`

"""Many steps run side by side: their calls take one round trip, and their waits run at the same time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any, Generic

from redis.exceptions import RedisError

from ..clock import monotonic
from .effects import Effect, Operation, ScriptBatch, ScriptCall, Sleep, Subscribe, T, Unsubscribe, WaitForWakeup
from .wakeups import LOOK_EVERY


class Abandoned(BaseException):
    """Thrown into steps whose result is not needed any more."""


def together(
    many: Sequence[Operation[T]], ended: dict[int, T], before_waiting: Callable[[], Operation[bool]] | None = None
) -> Operation[None]:
    """Run many steps side by side; `ended` gets the result of each.

    The steps of `before_waiting` run whenever all others only wait; once their result is False the others are
    abandoned. Raises the error of these steps, or the first error of the others, when all have ended.
    """
    if len(many) == 1 and before_waiting is None:  # as most are
        ended[0] = yield from many[0]
        return
    group = _Abreast(many, ended)
    for number in range(len(many)):
        group.proceed(number)
    try:
        while group.wants():
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
        if group.sleeper is not None:
            yield Unsubscribe(group.sleeper)
    if group.failure is not None:
        raise group.failure


class _Abreast(Generic[T]):
    """The next effect that each of the steps wants."""

    def __init__(self, many: Sequence[Operation[T]], ended: dict[int, T]) -> None:
        self._many = many
        self._ended = ended
        self.failure: BaseException | None = None
        self._calls: dict[int, ScriptCall] = {}
        self._pauses: dict[int, Sleep] = {}
        self._joins: dict[int, Subscribe] = {}
        self._sleeps: dict[int, WaitForWakeup] = {}
        self._others: dict[int, Effect] = {}
        self._kinds: dict[type, dict[int, Any]] = {
            ScriptCall: self._calls,
            Sleep: self._pauses,
            Subscribe: self._joins,
            WaitForWakeup: self._sleeps,
        }
        self._wanted: list[dict[int, Any]] = [*self._kinds.values(), self._others]
        self.sleeper: Any = None
        """The waiter that sleeps in the waiting room for all of them."""
        self._lock = b""
        self._new: list[int] = []
        """The numbers of the waits for which it does not sleep yet."""
        self._numbers: dict[Any, int] = {}
        """The numbers, by the waiters for which it sleeps."""
        self._until = math.inf
        """The time at which the first of them continues without a wake-up, or an earlier time."""

    def wants(self) -> bool:
        """Whether not all have ended."""
        return any(self._wanted)

    def has_work(self) -> bool:
        """Whether some of them want something else than to wait."""
        return bool(self._others or (self._calls and not (self._joins or self._pauses)))

    def proceed(self, number: int, result: Any = None, error: BaseException | None = None) -> None:
        """Continue one of them."""
        steps = self._many[number]
        for wanted in self._wanted:
            wanted.pop(number, None)
        try:
            effect = steps.send(result) if error is None else steps.throw(error)
        except StopIteration as stop:
            self._ended[number] = stop.value
        except Abandoned:
            pass
        except BaseException as raised:
            self.failure = self.failure or raised
        else:
            self._kinds.get(type(effect), self._others)[number] = effect
            if isinstance(effect, WaitForWakeup):
                self._new.append(number)

    def abandon(self) -> None:
        """End all of them."""
        for number in self._unended():
            self.proceed(number, error=Abandoned())

    def work(self) -> Operation[None]:
        """Run the effect of one, or all wanted calls together."""
        if self._others:
            number, effect = next(iter(self._others.items()))
            yield from self._do([number], effect)
        else:
            yield from self._do(list(self._calls), ScriptBatch(tuple(self._calls.values())))

    def wait(self) -> Operation[None]:
        """Enter the waiting room, pause, or sleep."""
        if self._joins:
            number, join = next(iter(self._joins.items()))
            # They enter as if all waited for one lock: one looks twice a second, each of the others at the end of its
            # lock.
            self._lock = self._lock or join.lock
            yield from self._do([number], join._replace(lock=self._lock))
        elif self._pauses:
            longest = max(pause.seconds for pause in self._pauses.values())
            yield from self._do(list(self._pauses), Sleep(longest))
        else:
            yield from self._sleep()

    def _sleep(self) -> Operation[None]:
        """Sleep until one of them is woken, or its time is over."""
        if self.sleeper is None:
            first = next(iter(self._sleeps.values())).waiter
            try:
                self.sleeper = yield Subscribe(first.lock, first.id + b"+")
            except RedisError:  # there will be no wake-ups now
                yield from self._do(list(self._sleeps), Sleep(LOOK_EVERY))
                return
            self.sleeper.told = deque()
        told = self.sleeper.told
        while self._new:
            number = self._new.pop()
            if number in self._sleeps:
                waiter, until, look = self._sleeps[number]
                self._until = min(self._until, until, look)
                self._numbers[waiter] = number
                waiter.sleeper = self.sleeper
                if waiter.woken:  # before it had a sleeper
                    told.append(waiter)
        if not told:
            yield from self._do([], WaitForWakeup(self.sleeper, self._until, math.inf))
        while told:
            waiter = told.popleft()
            if waiter.woken and self._numbers[waiter] in self._sleeps:
                self.proceed(self._numbers[waiter], waiter.heed())
        now = monotonic()
        if now >= self._until:
            self._until = math.inf
            for number, (waiter, until, look) in list(self._sleeps.items()):
                if min(until, look) <= now:
                    self.proceed(number, waiter.heed())
                else:
                    self._until = min(self._until, until, look)

    def _unended(self) -> list[int]:
        return [number for wanted in self._wanted for number in wanted]

    def _do(self, numbers: list[int], effect: Effect) -> Operation[None]:
        """Run the effect for these; any error that is not of Redis interrupts all."""
        replies: list[Any] = []
        error: BaseException | None = None
        try:
            result = yield effect
            replies = result if isinstance(effect, ScriptBatch) else [result]
        except BaseException as raised:
            error = raised
            if not isinstance(error, RedisError):
                numbers = self._unended()
        for number, reply in zip(numbers, chain(replies, repeat(None)), strict=False):
            refused = reply if isinstance(reply, RedisError) else None
            self.proceed(number, reply, error or refused)

"""A round of somebody who asks, and whose body runs where that is done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from .cell import SOON


class Round:
    """One round of somebody whose body may run elsewhere: in a thread, a task or a worker. He asks again and again,
    until it has run, or what he asks for has come."""

    def __init__(self, timeout: float | None, body: Callable[[Any], Any]) -> None:
        self._body = body
        self._until = math.inf if timeout is None else time.monotonic() + timeout
        self.begun = False
        self._over_at = 0.0
        self._error: BaseException | None = None

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.begun = True
        try:
            yield
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._over_at = time.monotonic()

    def body(self, held: Any = None) -> str:
        if not self.begun:
            with self._running():
                self._body(held)
        return uuid4().hex

    async def abody(self, held: Any = None) -> str:
        if not self.begun:
            with self._running():
                await self._body(held)
        return uuid4().hex

    @property
    def has_run(self) -> bool:
        return bool(self._over_at)

    def is_over(self) -> bool:
        """Whether the body has run, and what it made has had the time to come; raise what it raised, or that it did not
        begin in time. (A value whose lease was lost may not come.)"""
        if self._error is not None:
            raise self._error
        if not self.begun and time.monotonic() > self._until:
            raise TimeoutError("it did not come in")
        return self.has_run and time.monotonic() > self._over_at + SOON

    @property
    def pause(self) -> float:
        """Seconds until he looks again."""
        return 0.001 if self.begun else 0.02

    def end(self) -> None:
        """Let nobody begin any more: he has what he asked for."""
        self.begun = True

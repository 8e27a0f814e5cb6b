"""A seat for one, in place of a lock.

A signal handler or a destructor may run at any point of any function, in the thread that it interrupts, which goes on only
when the handler has returned. A lock that this thread holds would never be released; a handler that waits for another thread
may even keep out that thread. A seat is taken and left by single operations of a dict instead, with and without the GIL.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Seat(Generic[T]):
    """Holds nothing, or one thing: the first that takes it."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: dict[None, T] = {}

    def take(self, one: T) -> T:
        """Take the seat if it is free, and return what has it then."""
        return self._taken.setdefault(None, one)

    @property
    def taken_by(self) -> T | None:
        """What has the seat."""
        return self._taken.get(None)

    def leave(self, one: T) -> None:
        """Free the seat if this has it. Nothing takes the seat of another one, so nothing else is sent away."""
        if self._taken.get(None) is one:
            self._taken.pop(None, None)

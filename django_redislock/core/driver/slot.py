"""A slot for one value, in place of a lock.

A signal handler or a destructor may run at any point of any function, in the thread that it interrupts, which
continues only when the handler has returned. A lock that this thread holds would never be released; a handler that
waits for another thread may even block that thread. The operations of a slot are single operations of a dict instead,
atomic with and without the GIL.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Slot(Generic[T]):
    """Holds no value, or one: the first that is put there."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[None, T] = {}

    def put_if_empty(self, value: T) -> T:
        """Put the value into the slot if it is empty, and return the value that is there then."""
        return self._values.setdefault(None, value)

    @property
    def value(self) -> T | None:
        """The value in the slot, None when it is empty."""
        return self._values.get(None)

    def remove(self, value: T) -> None:
        """Empty the slot if it holds this value. No value replaces another one, so no other value is removed."""
        if self._values.get(None) is value:
            self._values.pop(None, None)

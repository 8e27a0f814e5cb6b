"""Helpers for tests of projects that use locks: grant every lock without Redis, and assert that a lock was acquired."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from django.conf import settings
from django.test import SimpleTestCase, override_settings

from . import conf
from .core import events

C = TypeVar("C", bound=type)


class unlocked(override_settings):
    """Grant every lock at once, without Redis, in the block, the function or the Django TestCase class that it
    decorates.

    The other settings do not change. Locks still report their acquisitions, so `assert_locked` works. For a class it
    begins before ``setUpClass``, as `override_settings` does. Raises ValueError for other classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[override_settings] = []  # a decorated function may call itself

    def enable(self) -> None:
        """Begin to grant every lock."""
        block = override_settings(**{conf.NAME: _off(getattr(settings, conf.NAME, None))})
        block.enable()
        self._blocks.append(block)

    def disable(self) -> None:
        """End the most recent block."""
        self._blocks.pop().disable()

    def decorate_class(self, cls: C) -> C:
        """Begin with the class, and end with it."""
        if not issubclass(cls, SimpleTestCase):
            raise ValueError(
                f"unlocked() decorates functions and subclasses of Django's SimpleTestCase, not {cls.__qualname__}; "
                f"for a "
                'class of pytest use the fixture: @pytest.mark.usefixtures("redislock_unlocked")'
            )
        before: dict[str, Any] = cls._overridden_settings or {}  # type: ignore[attr-defined]
        ours = _off(before.get(conf.NAME, getattr(settings, conf.NAME, None)))
        cls._overridden_settings = {**before, conf.NAME: ours}  # type: ignore[attr-defined]
        return cls


class UnlockedMixin:
    """Runs the tests of a class and of its subclasses `unlocked`; write it left of Django's TestCase."""

    @classmethod
    def setUpClass(cls) -> None:
        unlocked().decorate_class(cls)
        super().setUpClass()  # type: ignore[misc]


def _off(given: Any) -> dict[str, Any]:
    """Return these settings with the locks switched off."""
    return {**(given or {}), "ENABLED": False}


@contextmanager
def assert_locked(name: str) -> Iterator[list[str]]:
    """Assert that this process acquires a lock of this name in the block, and return the names of all acquired locks.

    A ``*`` in the name matches any text, so ``"celery:shop.tasks.send:*"`` is the lock of a task with any arguments.
    Raises AssertionError at the end of a block that acquired no such lock.
    """
    acquired: list[str] = []

    def listen(event: str, data: dict[str, Any]) -> None:
        if event == "acquired":
            acquired.append(data["name"])

    events.listeners.append(listen)
    try:
        yield acquired
    finally:
        events.listeners.remove(listen)
    if not any(other == name or fnmatchcase(other, name) for other in acquired):
        raise AssertionError(
            f"No lock {name!r} was acquired. The acquired locks: {', '.join(map(repr, acquired)) or 'none'}."
        )

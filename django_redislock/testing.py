"""For the tests of projects that use locks: everything unlocked, and whether a lock was taken."""

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
    """Grant every lock at once, without Redis, in the block, the function or the Django TestCase class that it decorates.

    The other settings stay as they are. Locks still report that they were acquired, so `assert_locked` works. For a
    class it begins before ``setUpClass``, as `override_settings` does. Raises ValueError for other classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[override_settings] = []  # a decorated function may call itself

    def enable(self) -> None:
        """Begin."""
        block = override_settings(**{conf.NAME: _off(getattr(settings, conf.NAME, None))})
        block.enable()
        self._blocks.append(block)

    def disable(self) -> None:
        """End the block that began last."""
        self._blocks.pop().disable()

    def decorate_class(self, cls: C) -> C:
        """Have it begin with the class."""
        if not issubclass(cls, SimpleTestCase):
            raise ValueError(
                f"unlocked() decorates functions and subclasses of Django's SimpleTestCase, not {cls.__qualname__}; for a class of "
                'pytest use the fixture: @pytest.mark.usefixtures("redislock_unlocked")'
            )
        before: dict[str, Any] = cls._overridden_settings or {}  # type: ignore[attr-defined]
        ours = _off(before.get(conf.NAME, getattr(settings, conf.NAME, None)))
        cls._overridden_settings = {**before, conf.NAME: ours}  # type: ignore[attr-defined]
        return cls


class UnlockedMixin:
    """Put it left of a Django TestCase: its tests, and those of its subclasses, are `unlocked`."""

    @classmethod
    def setUpClass(cls) -> None:
        unlocked().decorate_class(cls)
        super().setUpClass()  # type: ignore[misc]


def _off(given: Any) -> dict[str, Any]:
    """Return the settings with the locks switched off."""
    return {**(given or {}), "ENABLED": False}


@contextmanager
def assert_locked(name: str) -> Iterator[list[str]]:
    """Assert that this process acquires a lock of this name in the block, and give the names of all that it acquires.

    A ``*`` in the name stands for anything, so ``"celery:shop.tasks.send:*"`` is the lock of a task with any arguments. Raises
    AssertionError at the end of a block that took no such lock.
    """
    taken: list[str] = []

    def listen(event: str, data: dict[str, Any]) -> None:
        if event == "acquired":
            taken.append(data["name"])

    events.listeners.append(listen)
    try:
        yield taken
    finally:
        events.listeners.remove(listen)
    if not any(each == name or fnmatchcase(each, name) for each in taken):
        raise AssertionError(f"No lock {name!r} was taken; those taken are {', '.join(map(repr, taken)) or 'none'}.")

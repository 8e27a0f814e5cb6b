"""For the tests of projects that use locks: everything unlocked, and whether a lock was taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from django.conf import settings
from django.test import override_settings

from . import conf
from .core import events


@contextmanager
def unlocked() -> Iterator[None]:
    """Grant every lock at once, without Redis, in the block or in the function that it decorates.

    The other settings stay as they are; locks still tell that they were acquired, so `assert_locked` works in it.
    """
    with override_settings(**{conf.NAME: {**(getattr(settings, conf.NAME, None) or {}), "ENABLED": False}}):
        yield


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

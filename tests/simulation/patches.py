"""How a defect is planted: the text of a script, a function or a constant is changed for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from django_redislock.core.driver.effects import Script

Planted = Callable[[], AbstractContextManager[None]]


@contextmanager
def script(which: Script, old: str, new: str) -> Iterator[None]:
    """Change the text of a script."""
    text = which.text
    assert old.encode() in text, f"{which} does not contain {old!r}"
    which.text = text.replace(old.encode(), new.encode())
    try:
        yield
    finally:
        which.text = text


@contextmanager
def attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Change a function or a constant."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

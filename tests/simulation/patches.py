"""How a defect is planted: the text of a script, a function or a constant is changed for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Defect = tuple[Any, str, Any]
"""A script, and what of its text is replaced by which text; or an object, and its attribute that has another value."""


@contextmanager
def planted(defect: Defect) -> Iterator[None]:
    """Change it for a while."""
    owner, name, value = defect
    if isinstance(value, str):
        assert name.encode() in owner.text, f"{owner} does not contain {name!r}"
        name, value = "text", owner.text.replace(name.encode(), value.encode())
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

"""A Lua script, ready for EVALSHA."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

LOCK_SCRIPTS = files(__package__.rpartition(".")[0]) / "lua"


class Script:
    """One Lua script: the texts of the parts that it uses, followed by the text of its own file.

    The files are in the folder ``lua`` of the package `home`, or of the lock. `granted` takes a reply and returns
    whether it grants or renews a lock; it is None for a script that does neither.
    """

    def __init__(self, name: str, *parts: str, home: str = "", granted: Callable[[Any], bool] | None = None) -> None:
        folders = [files(home) / "lua", LOCK_SCRIPTS] if home else [LOCK_SCRIPTS]
        self.name = name
        self.granted = granted
        self.text = b"".join(_read(part, folders) for part in ("lib", *parts, name))
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()

    def __repr__(self) -> str:
        return f"<Script {self.name}>"


def _read(part: str, folders: list[Traversable]) -> bytes:
    found = [path for folder in folders if (path := folder / f"{part}.lua").is_file()]
    return found[0].read_bytes()

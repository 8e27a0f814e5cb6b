"""The Lua scripts, each with its digest; one file a script in ``lua/``."""

from __future__ import annotations

import hashlib
from importlib.resources import files


class Script:
    """One Lua script, ready for EVALSHA."""

    def __init__(self, name: str, *before: str) -> None:
        folder = files(__package__) / "lua"
        self.name = name
        self.text = b"".join((folder / f"{part}.lua").read_bytes() for part in ("lib", *before, name))
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()

    def __repr__(self) -> str:
        return f"<Script {self.name}>"


ACQUIRE = Script("acquire", "index", "take", "quick", "handover", "counts", "turns")
RELEASE = Script("release", "receipts", "handover")
RENEW = Script("renew", "index")
RESET = Script("reset", "receipts", "handover")
READ = Script("read", "handover", "waiters")
QUEUE = Script("queue", "handover", "waiters")
NAMES = Script("names")
COUNT = Script("count")
WAITS = Script("waits")
DUPLICATE = Script("duplicate", "counts")

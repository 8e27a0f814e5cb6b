"""The notes of ``redislock run --once KEY``: that a run of the key succeeded."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from .. import conf
from ..connections import get_client
from ..core.driver import process
from ..core.driver.effects import Pipeline
from ..core.driver.registry import server_of
from ..core.driver.retry import with_retries
from ..core.keys import milliseconds

KEEP = 86400.0
"""Seconds for which a run is remembered, where nothing else was asked for."""


class DoneRuns:
    """The runs of one key under the lock `name` that succeeded."""

    def __init__(self, name: str, key: str, keep: float | None, using: str | None) -> None:
        self._name = name
        self._server = server_of(get_client(using))
        # With the length, no two pairs of name and key make the same text, even if they contain colons.
        self._key = f"{{{conf.get().key_prefix}:run}}:done:{len(name)}:{name}:{key}".encode()
        self._keep = milliseconds(KEEP if keep is None else keep)

    def find(self) -> str | None:
        """Return where and when a run succeeded, or None. Raises LockBackendError when Redis cannot answer."""
        found = self._ask(b"GET", self._key)
        return None if found is None else found.decode(errors="replace")

    def remember(self) -> None:
        """Remember that a run succeeded now. Raises LockBackendError when Redis cannot answer."""
        now = datetime.now(UTC).isoformat(" ", "seconds")
        self._ask(b"SET", self._key, f"on {process.HOST} at {now}".encode(), b"PX", self._keep)

    def _ask(self, *command: bytes) -> bytes | None:
        _, (reply,) = self._server.run(with_retries(self._name, Pipeline((command,)), math.inf, self._server))
        return reply  # type: ignore[no-any-return]

"""A server that grants every lock and stores nothing, for ``ENABLED: False``."""

from __future__ import annotations

import time
from typing import Any

from . import scripts
from .driver.async_server import AsyncServer
from .driver.effects import Pipeline, ScriptBatch, ScriptCall
from .driver.server import DEFAULT_TIMEOUT, Server


class NullServer(Server):
    """Grants every lock and stores nothing; it has no connections."""

    def __init__(self) -> None:
        self.connection_class, self.settings, self.place = None, {}, None
        self.timeout = self.patience = DEFAULT_TIMEOUT
        self.limit = 0
        self.forget_connections()

    def renew(self, call: ScriptCall | ScriptBatch, patience: float) -> Any:
        """Return the reply of a server that holds the lock."""
        return self.call(call)

    def call(self, call: ScriptCall | ScriptBatch | Pipeline) -> Any:
        """Return the reply of a server that grants the call."""
        if isinstance(call, ScriptBatch):
            return [self.call(script_call) for script_call in call.calls]
        if isinstance(call, Pipeline):
            return [None] * len(call.commands)
        match call.script:
            case scripts.ACQUIRE:
                return int(time.time() * 1_000_000)  # a fence that still grows
            case scripts.RENEW:
                return [1] * (len(call.keys) // 2)
            case scripts.READ:
                return [0, b"-1 -2 0 " * (len(call.keys) // 2), b""]
            case scripts.NAMES:
                return [0, b"0", b"", b""]
            case scripts.COUNT:
                return [0, 0, 0]
            case scripts.CAUSE:
                return [None] * (len(call.keys) // 2)
        return 1


class AsyncNullServer(AsyncServer):
    """The null server as an event loop sees it."""

    async def call(self, call: ScriptCall | Pipeline) -> Any:
        """Return the reply of a server that grants the call."""
        return NULL_SERVER.call(call)


NullServer.view_kind = AsyncNullServer
NULL_SERVER = NullServer()

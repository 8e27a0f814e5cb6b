"""A server that grants every lock and remembers nothing: ``ENABLED: False`` runs on it."""

from __future__ import annotations

import time
from typing import Any

from . import scripts
from .driver.async_server import AsyncServer
from .driver.connection import RespConnection, ScriptConnection
from .driver.effects import Pipeline, ScriptBatch, ScriptCall
from .driver.pool import ConnectionPool
from .driver.server import DEFAULT_TIMEOUT, Server
from .driver.wakeups_threads import WaitingRoom


class NullServer(Server):
    """A server that grants everything and remembers nothing: what ``ENABLED: False`` runs on."""

    patience = DEFAULT_TIMEOUT

    def __init__(self) -> None:
        self.views = {}
        self.connection_class, self.settings, self.timeout, self.place = None, {}, DEFAULT_TIMEOUT, None
        self.room = WaitingRoom(lambda: RespConnection(self.connection()), self.patience)
        self.links = ConnectionPool(0, 0.0, lambda: ScriptConnection(self.connection()))

    def renew(self, call: ScriptCall, patience: float) -> Any:
        """Grant it."""
        return self.call(call)

    def call(self, call: ScriptCall | ScriptBatch | Pipeline) -> Any:
        """Grant it."""
        if isinstance(call, ScriptBatch):
            return [self.call(each) for each in call.calls]
        if isinstance(call, Pipeline):
            return [None] * len(call.commands)
        match call.script:
            case scripts.ACQUIRE:
                return int(time.time() * 1_000_000)  # a fence that grows all the same
            case scripts.RENEW:
                return [1] * (len(call.keys) // 2)
            case scripts.READ:
                return [0, b"-1 -2 0 " * (len(call.keys) // 2), b""]
            case scripts.NAMES:
                return [0, b"0", b"", b""]
            case scripts.COUNT:
                return 0
            case scripts.CAUSE:
                return [None] * (len(call.keys) // 2)
        return 1


class AsyncNullServer(AsyncServer):
    """A server that grants everything and remembers nothing."""

    async def call(self, call: ScriptCall) -> Any:
        """Grant it."""
        return NULL_SERVER.call(call)


NullServer.view_kind = AsyncNullServer
NULL_SERVER = NullServer()

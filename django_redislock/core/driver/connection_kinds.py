"""redis-py's connections of the same settings, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import inspect
from functools import lru_cache
from typing import Any

from redis import connection as for_threads, sentinel
from redis.asyncio import connection as for_asyncio, sentinel as async_sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

_NAMES = ("Connection", "SSLConnection", "UnixDomainSocketConnection")
_THREADS = {getattr(for_asyncio, name): getattr(for_threads, name) for name in _NAMES}
_ASYNCIO = {of_threads: of_asyncio for of_asyncio, of_threads in _THREADS.items()} | {
    sentinel.SentinelManagedConnection: async_sentinel.SentinelManagedConnection,
    sentinel.SentinelManagedSSLConnection: async_sentinel.SentinelManagedSSLConnection,
}
# What means something to one of the two kinds only.
_APART = frozenset({"parser_class", "command_packer"})


def sync_connection_kind(kind: type, settings: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """Return the class and the settings of the connections for threads that do as these asyncio connections.

    Raises TypeError when there are none.
    """
    if kind not in _THREADS:
        raise TypeError(
            f"client makes connections of {kind.__module__}.{kind.__qualname__}, which have no counterpart for threads; "
            "give the synchronous client of the same server instead: asyncio connections of its own will be made"
        )
    return _THREADS[kind], {key: value for key, value in settings.items() if key not in _APART}


def new_async_connection(kind: type, settings: dict[str, Any]) -> Any:
    """Return a new connection for asyncio, not connected yet, that does as those for threads.

    Raises TypeError when there is none.
    """
    if kind not in _ASYNCIO:
        raise TypeError(
            f"client makes connections of {kind.__module__}.{kind.__qualname__}, which have no counterpart for asyncio; "
            "use a redis.asyncio.Redis, or connections of redis-py's own classes"
        )
    twin = _ASYNCIO[kind]
    known = {name for base in twin.__mro__ for name in inspect.signature(base.__init__).parameters}
    ours = {key: value for key, value in settings.items() if key not in _APART and (key in known or value)}
    if "connection_pool" in ours:
        ours["connection_pool"] = _Primary(ours["connection_pool"])
    # Without a name, a connection that the server refuses can still read the error.
    return twin(**ours, **nameless(twin), retry=Retry(NoBackoff(), 0))


@lru_cache
def nameless(kind: type) -> dict[str, None]:
    """Return the settings with which a connection of redis-py's does not send its library's name.

    The answers are not needed, and they take two of the three round trips of connecting.
    """
    if not kind.__module__.startswith("redis."):
        return {}
    known = {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters}  # type: ignore[misc]
    return {"driver_info": None} if "driver_info" in known else {"lib_name": None, "lib_version": None}


class _Primary:
    """Where the primary is, as redis-py's asyncio connection asks for it; Sentinel is asked by a thread meanwhile."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.is_master = True
        self.check_connection = False

    async def get_master_address(self) -> Any:
        return await asyncio.to_thread(self._pool.get_master_address)

"""The backends of one process, for tests and development without Redis; import them from `django_redislock.cache`.

They have every method and every argument check of the Redis backends, and Django's own storage. No caller waits for a
value that another caller computes, and no value is kept beyond its timeout.
"""

from __future__ import annotations

from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.cache.backends.dummy import DummyCache as DjangosDummyCache
from django.core.cache.backends.locmem import LocMemCache as DjangosLocMemCache

from ...core.driver.process import after_in_child
from ...core.driver.server import Server
from ...core.memory_server import MemoryServer
from ..compute_once import ComputeOnceMixin
from ..invalidation import InvalidatingMixin


class LocalBackend(ComputeOnceMixin):
    """The methods of a backend without Redis: values have no server, and locks have one in this process."""

    def _server_of(self, redis_key: str) -> Server | None:
        return None

    def _client_for(self, redis_key: str, write: bool = True) -> Any:
        return _servers.setdefault((type(self).__name__, self._constructor_args[0]), MemoryServer())

    def _all_clients(self) -> list[Any]:
        return [self._client_for("")]

    def _redis_key(self, key: Any, version: int | None, *args: Any, **kwargs: Any) -> str:
        return self.make_key(key, version)

    def _stores(self, timeout: float | None) -> bool:
        seconds = self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
        return seconds is None or seconds > 0

    def clear(self) -> Any:
        """Delete all values."""
        return super(InvalidatingMixin, self).clear()


class LocMemCache(LocalBackend, DjangosLocMemCache):
    """Django's cache of one process, with the methods of the Redis backends and locks between its threads."""


class DummyCache(LocalBackend, DjangosDummyCache):
    """Django's cache that keeps nothing, with the methods of the Redis backends and locks between its threads."""


_servers: dict[tuple[str, str], MemoryServer] = {}
"""The servers by kind and LOCATION of the cache, because Django makes a backend for every thread and task."""


def _after_fork() -> None:
    for server in _servers.values():
        server.forget()


after_in_child("local server", _after_fork)

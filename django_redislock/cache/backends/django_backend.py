"""The backends on Django's own, for Redis and for one process; import them from `django_redislock.cache`."""

from __future__ import annotations

import glob
import time
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.cache.backends.dummy import DummyCache as DjangosDummyCache
from django.core.cache.backends.locmem import LocMemCache as DjangosLocMemCache
from django.core.cache.backends.redis import RedisCache, RedisCacheClient
from django.utils.functional import cached_property
from redis import Redis

from ...core.driver.process import after_in_child
from ...core.driver.server import Server
from ...core.memory_server import MemoryServer
from ..compute_once import ComputeOnceMixin
from ..invalidation import InvalidatingMixin
from ..page_cache import patterns_with
from .base import SplittingRedis


class DjangoRedisCache(ComputeOnceMixin, RedisCache):
    """Django's own Redis backend, with a `get_or_set` that computes once."""

    def _client_for(self, redis_key: str, write: bool = True) -> Any:
        if not self._has_one_server:
            return self._cache.get_client(redis_key, write=write)
        pool = self._cache._get_connection_pool(write)
        client = self._clients.get(pool)
        if client is None:
            client = self._clients[pool] = self._cache._client(connection_pool=pool)
        return client

    @cached_property
    def _clients(self) -> dict[Any, Redis]:
        """The clients by their pools, because making a client takes longer than a command."""
        return {}

    @cached_property
    def _has_one_server(self) -> bool:
        # Another class may choose the server by the key.
        return type(self._cache).get_client is RedisCacheClient.get_client

    def _stores(self, timeout: float | None) -> bool:
        return self.get_backend_timeout(timeout) != 0

    def _dumps(self, redis_key: str, value: Any, timeout: float | None) -> tuple[bytes, int | None]:
        seconds = self.get_backend_timeout(timeout)
        return self._encoder.encode(self._serializer.dumps(value)), None if seconds is None else int(seconds * 1000)

    def _loads(self, redis_key: str, data: bytes) -> Any:
        return self._serializer.loads(self._encoder.decode(data))

    @cached_property
    def _encoder(self) -> Any:
        """The client's own: with `decode_responses` the serializer gets and returns text, in any encoding."""
        return self._client_for("").get_encoder()

    @cached_property
    def _cache(self) -> Any:
        base: Any = self
        cache = base._class(base._servers, **base._options)
        if cache._client is Redis:
            cache._client = SplittingRedis
        return cache

    @property
    def _serializer(self) -> Any:
        return self._cache._serializer


class LocalBackend(ComputeOnceMixin):
    """A backend of one process, for tests and development without Redis: values have no server, locks one in memory.

    It has every method and every argument check of the Redis backends, and Django's own storage. No caller waits for a
    value that another caller computes, and no value is kept beyond its timeout.
    """

    _refreshes_by_own_keys = False

    def _server_of(self, redis_key: str) -> Server | None:
        return None

    def _client_for(self, redis_key: str, write: bool = True) -> Any:
        return _servers.setdefault((type(self).__name__, self._constructor_args[0]), MemoryServer())

    def _stores(self, timeout: float | None) -> bool:
        seconds = self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
        return seconds is None or seconds > 0

    def clear(self) -> Any:
        """Delete all values."""
        return super(InvalidatingMixin, self).clear()


class LocMemCache(LocalBackend, DjangosLocMemCache):
    """Django's cache of one process, with the methods of the Redis backends and locks between its threads.

    Of django-redis's own methods it has `delete_pattern`, `expire` and `ttl`.
    """

    def delete_pattern(
        self,
        pattern: str,
        version: int | None = None,
        prefix: str | None = None,
        client: object = None,
        itersize: int | None = None,
    ) -> int:
        """Delete all values whose keys match the pattern (``*``, ``?``, ``[ab]``); return their number."""
        cache: Any = self
        begin = glob.escape(self.key_prefix if prefix is None else prefix)
        version = self.version if version is None else version
        patterns = [self.key_func(each, begin, version).replace("[^", "[!") for each in patterns_with(pattern)]
        with cache._lock:
            found = [key for key in cache._cache if any(fnmatchcase(key, each) for each in patterns)]
            alive = sum(not cache._has_expired(key) for key in found)
            for key in found:
                cache._delete(key)
        return alive

    def expire(
        self, key: str, timeout: float | timedelta | None, version: int | None = None, client: object = None
    ) -> bool:
        """Give the value a new timeout in seconds; 0 deletes it. Return whether there is a value."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        return self.touch(key, seconds, version)

    def ttl(self, key: str, version: int | None = None, client: object = None) -> int | None:
        """Return the seconds left of the value: 0 where there is none, None where it has no timeout."""
        cache: Any = self
        made = self.make_and_validate_key(key, version)
        with cache._lock:
            if cache._has_expired(made):
                return 0
            ends = cache._expire_info[made]
        return None if ends is None else max(0, round(ends - time.time()))


class DummyCache(LocalBackend, DjangosDummyCache):
    """Django's cache that keeps nothing, with the methods of the Redis backends and locks between its threads."""


_servers: dict[tuple[str, str], MemoryServer] = {}
"""The servers by kind and LOCATION of the cache, because Django makes a backend for every thread and task."""


def _after_fork() -> None:
    for server in _servers.values():
        server.forget()


after_in_child("local server", _after_fork)

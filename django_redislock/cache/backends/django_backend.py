"""The backend on Django's own; import it from `django_redislock.cache`."""

from __future__ import annotations

from typing import Any

from django.core.cache.backends.redis import RedisCache, RedisCacheClient
from django.utils.functional import cached_property
from redis import Redis

from ..compute_once import ComputeOnceMixin
from .base import SplittingRedis, as_bytes


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

    def _all_clients(self) -> list[Redis]:
        return [self._client_for("")]

    def _redis_key(self, key: Any, version: int | None, *args: Any, **kwargs: Any) -> str:
        return self.make_key(key, version)

    def _stores(self, timeout: float | None) -> bool:
        return self.get_backend_timeout(timeout) != 0

    def _dumps(self, redis_key: str, value: Any, timeout: float | None) -> tuple[bytes, int | None]:
        seconds = self.get_backend_timeout(timeout)
        return as_bytes(self._serializer.dumps(value)), None if seconds is None else int(seconds * 1000)

    def _loads(self, redis_key: str, data: bytes) -> Any:
        return self._serializer.loads(data)

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

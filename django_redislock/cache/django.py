"""The backend on Django's own; import it from `django_redislock.cache`."""

from __future__ import annotations

from typing import Any

from django.core.cache.backends.redis import RedisCache
from redis import Redis

from .base import as_bytes
from .mixin import ComputeOnceMixin


class DjangoRedisCache(ComputeOnceMixin, RedisCache):
    """Django's own Redis backend, with a `get_or_set` that computes once."""

    def _redis(self, made: str, write: bool = True) -> Redis:
        return self._cache.get_client(made, write=write)

    def _every_redis(self) -> list[Redis]:
        return [self._redis("")]

    def _made(self, key: Any, version: int | None, *args: Any, **kwargs: Any) -> str:
        return self.make_key(key, version)

    def _is_kept(self, timeout: float | None) -> bool:
        return self.get_backend_timeout(timeout) != 0

    def _pack(self, made: str, value: Any, timeout: float | None) -> tuple[bytes, int | None]:
        seconds = self.get_backend_timeout(timeout)
        return as_bytes(self._serializer.dumps(value)), None if seconds is None else int(seconds * 1000)

    def _unpack(self, made: str, data: bytes) -> Any:
        return self._serializer.loads(data)

    @property
    def _serializer(self) -> Any:
        return self._cache._serializer  # type: ignore[attr-defined]

"""What differs between django-redis's backend and Django's own."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.core.cache.backends.base import BaseCache
from redis import Redis

from ...core.driver.registry import server_of
from ...core.driver.server import Server
from ...core.events import log

if TYPE_CHECKING:
    Base = BaseCache
else:
    Base = object


@lru_cache
def warn_once(message: str) -> None:
    """Log the warning once in each process."""
    log.warning(message)


class RedisBackend(Base):
    """What the mixins need to know of the backend that they are put in front of."""

    def _server_of(self, made: str) -> Server | None:
        """Return the server of the key, or None when its client is of a kind that has no locks."""
        return self._server_at(self._redis(made))

    def _server_at(self, client: Redis) -> Server | None:
        try:
            return server_of(client)
        except TypeError as error:
            warn_once(f"The cache works without locks: {error}.")
            return None

    def _redis(self, made: str, write: bool = True) -> Redis:
        """Return the client of the primary that holds the key, or of what it is read from."""
        raise NotImplementedError

    @property
    def _has_one_server(self) -> bool:
        """Whether one server, with its replicas, has all keys."""
        raise NotImplementedError

    def _every_redis(self) -> list[Redis]:
        """Return a client for each primary."""
        raise NotImplementedError

    def _made(self, key: Any, version: int | None, *args: Any, **kwargs: Any) -> str:
        """Return the key in Redis."""
        raise NotImplementedError

    def _is_kept(self, timeout: float | None) -> bool:
        """Whether the base class stores a value with this timeout at all."""
        raise NotImplementedError

    def _pack(self, made: str, value: Any, timeout: float | None) -> tuple[bytes, int | None]:
        """Return the bytes that the base class stores, and their life in milliseconds (None: for ever)."""
        raise NotImplementedError

    def _unpack(self, made: str, data: bytes) -> Any:
        """Return the value as the base class's `get` does, or MISSING."""
        raise NotImplementedError

    def _is_forgiving(self) -> bool:
        """Whether the base class ignores errors of Redis."""
        return False


def as_bytes(value: Any) -> bytes:
    """Return a serialized value as redis-py would send it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value).encode()
    return value.encode() if isinstance(value, str) else bytes(value)

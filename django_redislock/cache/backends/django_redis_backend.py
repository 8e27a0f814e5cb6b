"""The backend on django-redis; import it from `django_redislock.cache`."""

from __future__ import annotations

from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.utils.functional import cached_property
from django_redis.cache import RedisCache as DjangoRedisBase  # type: ignore[import-untyped]
from django_redis.client import DefaultClient  # type: ignore[import-untyped]
from django_redis.client.sharded import ShardClient  # type: ignore[import-untyped]
from redis import Redis

from ..compute_once import ComputeOnceMixin
from ..invalidation import ExpiringMixin
from ..lease.request import MISSING
from .base import as_bytes


class RedisCache(ComputeOnceMixin, ExpiringMixin, DjangoRedisBase):  # type: ignore[misc]
    """django-redis's backend, with a `get_or_set` that computes once."""

    def _redis(self, made: str, write: bool = True) -> Any:
        client = self.client
        return client.get_server(made) if isinstance(client, ShardClient) else client.get_client(write=write)

    @cached_property
    def _has_one_server(self) -> bool:
        return not isinstance(self.client, ShardClient)

    def _every_redis(self) -> list[Redis]:
        client = self.client
        return list(client._serverdict.values()) if isinstance(client, ShardClient) else [client.get_client(write=True)]

    def _made(
        self, key: Any, version: int | None, prefix: str | None = None, client: object = None, **kwargs: Any
    ) -> str:
        return self.client.make_key(key, version=version, prefix=prefix)  # type: ignore[no-any-return]

    def _is_kept(self, timeout: float | None) -> bool:
        if timeout is DEFAULT_TIMEOUT:
            timeout = self.default_timeout
        return timeout is None or int(timeout * 1000) > 0

    def _pack(self, made: str, value: Any, timeout: float | None) -> tuple[bytes, int | None]:
        # The client class makes the bytes by itself, on a connection that only writes down what it would send: Herd, for
        # one, wraps the value and adds to its life.
        note = _Note()
        self._class.set(self.client, made, value, timeout=timeout, client=note)
        return as_bytes(note.value), note.life

    def _unpack(self, made: str, data: bytes) -> Any:
        if self._only_decodes:
            return self.client.decode(data)
        return self._class.get(self.client, made, default=MISSING, client=_Note(data))

    @cached_property
    def _only_decodes(self) -> bool:
        """Whether the client only decodes the bytes that it has read."""
        return self._class.get is DefaultClient.get

    @property
    def _class(self) -> Any:
        # A sharded client chooses the connection and wants none given.
        return DefaultClient if isinstance(self.client, ShardClient) else type(self.client)

    def _is_forgiving(self) -> bool:
        return bool(self._ignore_exceptions)


class _Note:
    """A connection that takes down the value that is set, and gives the one that it has."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.life: int | None = None

    def set(self, key: str, value: Any, *, px: int | None = None, **flags: bool) -> bool:
        self.value, self.life = value, px
        return True

    def get(self, key: str) -> Any:
        return self.value

"""The backend on django-redis; import it from `django_redislock.cache`."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.utils.functional import cached_property
from django_redis.cache import RedisCache as DjangoRedisBase  # type: ignore[import-untyped]
from django_redis.client import DefaultClient, HerdClient  # type: ignore[import-untyped]
from django_redis.client.sharded import ShardClient  # type: ignore[import-untyped]
from redis import Redis

from ..compute_once import ComputeOnceMixin
from ..invalidation import DjangoRedisInvalidatingMixin
from ..lease.request import MISSING
from .base import SplittingRedis, as_bytes


class RedisCache(ComputeOnceMixin, DjangoRedisInvalidatingMixin, DjangoRedisBase):  # type: ignore[misc]
    """django-redis's backend, with a `get_or_set` that computes once."""

    more_options: ClassVar[dict[str, Any]] = {
        "REDIS_CLIENT_CLASS": f"{SplittingRedis.__module__}.{SplittingRedis.__qualname__}"
    }

    def _client_for(self, redis_key: str, write: bool = True) -> Any:
        client = self.client
        return client.get_server(redis_key) if isinstance(client, ShardClient) else client.get_client(write=write)

    @cached_property
    def _has_one_server(self) -> bool:
        return not isinstance(self.client, ShardClient)

    def _all_clients(self) -> list[Redis]:
        client = self.client
        return list(client._serverdict.values()) if isinstance(client, ShardClient) else super()._all_clients()

    def _redis_key(
        self, key: Any, version: int | None, prefix: str | None = None, client: object = None, **kwargs: Any
    ) -> str:
        return self.client.make_key(key, version=version, prefix=prefix)  # type: ignore[no-any-return]

    @property
    def _makes_keys_as_base(self) -> bool:
        return type(self.client).make_key is DefaultClient.make_key

    def _stores(self, timeout: float | None) -> bool:
        if timeout is DEFAULT_TIMEOUT:
            timeout = self.default_timeout
        return timeout is None or int(timeout * 1000) > 0

    def _dumps(self, redis_key: str, value: Any, timeout: float | None) -> tuple[bytes, int | None]:
        return self._dumps_as(self._class, redis_key, value, timeout)

    def _dumps_plainly(self, redis_key: str, value: Any, timeout: float | None) -> tuple[bytes, int | None]:
        return self._dumps_as(
            DefaultClient if issubclass(self._class, HerdClient) else self._class, redis_key, value, timeout
        )

    def _dumps_as(self, kind: Any, redis_key: str, value: Any, timeout: float | None) -> tuple[bytes, int | None]:
        # The client class makes the bytes itself and sends them to a client that only records them: the Herd client
        # wraps the value and lengthens its expiry.
        client = _RecordingClient()
        kind.set(self.client, redis_key, value, timeout=timeout, client=client)
        return as_bytes(client.value), client.expiry_ms

    def _loads(self, redis_key: str, data: bytes) -> Any:
        if self._only_decodes:
            return self.client.decode(data)
        return self._class.get(self.client, redis_key, default=MISSING, client=_RecordingClient(data))

    @cached_property
    def _only_decodes(self) -> bool:
        """Whether the client only decodes the bytes that it has read."""
        return self._class.get is DefaultClient.get

    @property
    def _class(self) -> Any:
        # A sharded client chooses its connection itself and accepts none.
        return DefaultClient if isinstance(self.client, ShardClient) else type(self.client)

    def _ignores_errors(self) -> bool:
        return bool(self._ignore_exceptions)


class _RecordingClient:
    """A client that records the value that is set, and returns the value that it was made with."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.expiry_ms: int | None = None

    def set(self, key: str, value: Any, *, px: int | None = None, **flags: bool) -> bool:
        self.value, self.expiry_ms = value, px
        return True

    def get(self, key: str) -> Any:
        return self.value

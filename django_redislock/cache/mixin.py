"""A `get_or_set` that computes a missing value once, for any Redis cache backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from django.core.cache.backends.base import DEFAULT_TIMEOUT

from .. import conf
from ..core.flight import invalidate
from ..core.keys import Seconds, check_expire, check_timeout
from ..core.server import Server
from ..core.wanted import MISSING, Wanted
from ..exceptions import LockBackendError
from .flights import value_of
from .locks import LocksMixin

OPTION = "CACHES[…]['OPTIONS']['LOCK']"


class ComputeOnceMixin(LocksMixin):
    """Put it left of a Redis cache backend, and give it the methods of `RedisBackend`."""

    def __init__(self, server: Any, params: dict[str, Any]) -> None:
        options = dict(params.get("OPTIONS") or {})  # the dict is shared by all instances of the alias
        self._lock_options = options.pop("LOCK", {})
        conf.override(conf.CacheSettings(), self._lock_options, OPTION)
        super().__init__(server, {**params, "OPTIONS": options})  # type: ignore[call-arg]

    def get_or_set(
        self,
        key: Any,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        lock: bool = True,
        wait: Seconds | None = None,
        on_wait_timeout: str | None = None,
        expire: Seconds | None = None,
        auto_renewal: bool | None = None,
        max_hold: Seconds | None = None,
    ) -> Any:
        """Return the value of the key; when it is missing, have one of all callers compute it by `default()` and store it.

        The others wait for it at most `wait` seconds; then `on_wait_timeout` says "compute", for oneself, or "raise"
        AcquireTimeout. `expire` is the life in seconds of the right to compute, renewed while `default` runs (`auto_renewal`),
        at most for `max_hold` seconds; another one takes over when it ends. What is not given comes from
        ``OPTIONS["LOCK"]`` and ``DJANGO_REDISLOCK["CACHE"]``. A value that was deleted or set meanwhile is not overwritten.

        Without `lock`, with a default that is not callable or a timeout of 0 this is Django's own method. Raises what
        `default` raises, and redis-py's errors, if the base class does.
        """
        given = _checked(lock, wait, on_wait_timeout, expire, auto_renewal, max_hold)
        if not lock or not callable(default):
            return super().get_or_set(key, default, timeout, version)
        value = self.get(key, MISSING, version=version)
        if value is not MISSING:
            return value
        settings = conf.get()
        made = self._made(key, version)
        server = self._server_of(made)
        if server is None or not settings.enabled or not self._is_kept(timeout):
            return super().get_or_set(key, default, timeout, version)
        own = replace(conf.override(settings.cache, self._lock_options, OPTION), **given)
        want = Wanted(
            server=server,
            prefix=settings.key_prefix,
            key=made,
            default=default,
            pack=lambda value: self._pack(made, value, timeout),
            unpack=lambda data: self._unpack(made, data),
            expire=own.expire,
            auto_renewal=own.auto_renewal,
            max_hold=own.max_hold,
            forgiving=self._is_forgiving(),
        )
        return value_of(want, own.wait, own.on_wait_timeout == "compute")

    async def aget_or_set(
        self,
        key: Any,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Any,
    ) -> Any:
        """Do as `get_or_set`; `default` may be a coroutine function, too.

        A thread of its own waits, and nothing else with it. Sync defaults run where `sync_to_async` runs them.
        """
        if not callable(default):
            return await sync_to_async(self.get_or_set)(key, default, timeout, version, **options)
        value = await self.aget(key, MISSING, version=version)
        if value is not MISSING:
            return value

        async def compute() -> Any:
            if inspect.iscoroutinefunction(default):
                return await default()
            value = await sync_to_async(default)()
            return await value if inspect.isawaitable(value) else value

        executor = ThreadPoolExecutor(1, thread_name_prefix="redislock-get-or-set")
        try:
            get_or_set = sync_to_async(self.get_or_set, thread_sensitive=False, executor=executor)
            return await get_or_set(key, lambda: async_to_sync(compute)(), timeout, version, **options)
        finally:
            executor.shutdown(wait=False)

    def locked_get_or_set(
        self,
        key: str,
        value_creator: Callable[[], Any],
        version: int | None = None,
        expire: Seconds | None = None,
        id: str | None = None,
        lock_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Any:
        """Do as python-redis-lock's method of this name; `get_or_set` is better.

        Raises ValueError when `value_creator` returns None, which counts as a missing value here.
        """

        def create() -> Any:
            value = value_creator()
            if value is None:
                raise ValueError("`value_creator` must return a value")
            return value

        if lock_key is None and id is None:
            value = self.get_or_set(key, create, timeout, version, expire=expire)
            if value is not None:
                return value
        else:
            value = self.get(key, version=version)
            if value is not None:
                return value
        with self.lock(f"get_or_set:{key}" if lock_key is None else lock_key, version=version, expire=expire, id=id):
            value = self.get(key, version=version)
            if value is None:
                value = create()
                self.set(key, value, timeout=timeout, version=version)
            return value

    # What is computed must not be stored over what happened meanwhile. A `set` needs nothing: the value that is there then
    # is seen when the computed one is to be stored. And `clear` takes the leases along, since they are in the same database.

    def delete(self, key: Any, version: int | None = None, *args: Any, **kwargs: Any) -> bool:
        """Delete the value; one that is being computed now will not be stored."""
        self._invalidate([self._made(key, version, *args, **kwargs)])
        return super().delete(key, version, *args, **kwargs)

    def delete_many(self, keys: Iterable[Any], version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Delete the values; those that are being computed now will not be stored."""
        keys = list(keys)
        self._invalidate([self._made(key, version) for key in keys])
        return super().delete_many(keys, version, *args, **kwargs)

    def set(
        self,
        key: Any,
        value: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Store the value."""
        if not self._is_kept(timeout):  # it deletes
            self._invalidate([self._made(key, version)])
        return super().set(key, value, timeout, version, *args, **kwargs)

    def set_many(
        self,
        data: dict[Any, Any],
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Store the values."""
        if not self._is_kept(timeout):
            self._invalidate([self._made(key, version) for key in data])
        return super().set_many(data, timeout, version, *args, **kwargs)

    def _invalidate(self, keys: list[str]) -> None:
        settings = conf.get()
        if not settings.enabled:
            return
        by_server: dict[Server, list[str]] = {}
        for key in keys:
            server = self._server_of(key)
            if server is not None:
                by_server.setdefault(server, []).append(key)
        for server, its_keys in by_server.items():
            try:
                server.run(invalidate(settings.key_prefix, its_keys))
            except LockBackendError as error:
                if not self._is_forgiving():
                    raise (error.__cause__ or error) from None


def _checked(
    lock: object, wait: object, on_wait_timeout: object, expire: object, auto_renewal: object, max_hold: object
) -> dict[str, Any]:
    """Return those that are given, or raise TypeError or ValueError."""
    given: dict[str, Any] = {}
    if lock is not True and lock is not False:
        raise TypeError(f"lock must be True or False, not {lock!r}")
    if wait is not None:
        given["wait"] = check_timeout(wait, "wait")
    if on_wait_timeout is not None:
        if on_wait_timeout not in ("compute", "raise"):
            raise ValueError(f"on_wait_timeout must be 'compute' or 'raise', not {on_wait_timeout!r}")
        given["on_wait_timeout"] = on_wait_timeout
    if expire is not None:
        given["expire"] = check_expire(expire)
    if auto_renewal is not None:
        if not isinstance(auto_renewal, bool):
            raise TypeError(f"auto_renewal must be True or False, not {auto_renewal!r}")
        given["auto_renewal"] = auto_renewal
    if max_hold is not None:
        given["max_hold"] = check_expire(max_hold, "max_hold")
    return given

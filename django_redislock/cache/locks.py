"""Locks on the server of a cache, named with its prefix and version."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from django.core.exceptions import ImproperlyConfigured
from redis import Redis

from .. import conf
from ..core import Lock, held_locks
from ..core.driver.effects import Operation
from ..core.granted import Granted
from ..core.lease import Lease
from ..core.null_server import NULL_SERVER
from ..core.validation import AS_MADE, AsMade, Seconds, check_expire, wait_as_redis
from ..exceptions import AlreadyAcquired
from .backends.base import RedisBackend, warn_once

OF_TIMEOUT = (
    "The timeout of cache.lock(timeout=...) is the life of the lock, as in django-redis: the lock is not renewed, and "
    "the wait for it has no limit. Give blocking_timeout=... to limit the wait. Only the timeout of "
    "django_redislock.lock(timeout=...) is the wait."
)


class CacheLock(Lock):
    """A lock of a cache: redis-py's words for what `Lock` does, in redis-py's order.

    Its errors derive from ``redis.exceptions.LockError``, as those of redis-py's lock do.
    """

    _any_thread = False
    """Whether any thread may release what one of them acquired."""

    def acquire(  # type: ignore[override]
        self,
        sleep: float | bool | None = None,
        blocking: bool | AsMade | None = None,
        blocking_timeout: Seconds | None = None,
        token: str | bytes | None = None,
        *,
        timeout: Seconds | AsMade | None = AS_MADE,
    ) -> bool:
        """Acquire the lock, and tell whether it was acquired.

        Waits up to `blocking_timeout` seconds (or `timeout`, where None is for ever); without `blocking` it tries once.
        Arguments that are not given come from the lock. `token` is the id of this acquisition; of two acquisitions by
        one token, one holds the lock. `sleep` means nothing, but True or False in its place are python-redis-lock's:
        ``acquire(blocking, timeout)``.

        Raises what `Lock.acquire` does.
        """
        if isinstance(sleep, bool):
            if blocking is not None:
                timeout, blocking = blocking, None
            blocking = sleep if blocking is None else blocking
        try:
            return super().acquire(blocking, timeout, blocking_timeout=blocking_timeout, token=token)
        except AlreadyAcquired:
            if self._wait.seconds(blocking, timeout, blocking_timeout) != 0:
                raise
            return False

    def extend(  # type: ignore[override]
        self, additional_time: Seconds | None = None, replace_ttl: bool = False, *, expire: Seconds | None = None
    ) -> Literal[True]:
        """Add so many seconds to the rest of the held lock's life, and return True.

        With `replace_ttl`, or given as `expire`, they are its whole life from now on; without any, its own life begins
        again. Only the object that acquired the lock makes its life shorter.

        Raises NotAcquired, LockLost and LockBackendError as `release` does.
        """
        if additional_time is None or replace_ttl:
            return super().extend(expire if additional_time is None else additional_time)
        if expire is not None:
            raise TypeError("extend() takes additional_time or expire, and not both")
        return self._server.run(self._extend_by(self._acquirer(), check_expire(additional_time, "additional_time")))

    def _extend_by(self, acquirer: Any, seconds: float) -> Operation[Literal[True]]:
        holder = yield from self._owner()
        mine = holder is not None and holder.id == self._require_lease(acquirer).id
        return (yield from self._extend(acquirer, holder.ttl + seconds if mine and holder is not None else None))

    def _lease_of(self, acquirer: Any) -> Lease | None:
        if not self._any_thread:
            return super()._lease_of(acquirer)
        leases: list[Lease] = list(self._leases.values())
        return next((lease for lease in leases if not lease.inherited_by_fork), None)


class GrantedCacheLock(Granted, CacheLock):
    """A lock that is granted to everybody."""


class LocksMixin(RedisBackend):
    """`lock` and `reset_all`."""

    def lock(
        self,
        key: str,
        version: int | None = None,
        timeout: Seconds | None = None,
        sleep: float | None = None,
        blocking: bool = True,
        blocking_timeout: Seconds | None = None,
        client: Redis | None = None,
        thread_local: bool = True,
        *,
        expire: Seconds | None = None,
        auto_renewal: bool | None = None,
        max_hold: Seconds | None = None,
        id: str | None = None,
        label: str | None = None,
        on_lost: Callable[[Any], object] | None = None,
    ) -> CacheLock:
        """Return a lock on this cache's server, named with its prefix and version.

        It takes the words of django-redis, in its order, and those of python-redis-lock: `expire`, or `timeout`, is its life in
        seconds. With a life given it ends then, unless `auto_renewal` is true; without one it is renewed while its holder lives.
        `blocking` and `blocking_timeout` are how ``with`` and ``acquire()`` wait. With ``thread_local=False`` any thread may
        release it. `sleep` means nothing here, because no waiter polls.

        Raises TypeError and ValueError for bad arguments, and when both `expire` and `timeout` are given.
        """
        if expire is not None and timeout is not None:
            raise TypeError("lock() takes expire or timeout, which both mean its life, and not both")
        life = timeout if expire is None else expire
        if timeout is not None and blocking_timeout is None and blocking:
            warn_once(OF_TIMEOUT)
        name = self._made(key, version)
        settings = conf.get()
        if client is life is auto_renewal is max_hold is id is label is on_lost is None and thread_local:  # type: ignore[comparison-overlap]
            of, plain = self._plain
            if of is not settings:
                plain = self._plain_lock(settings)
            if plain is not None:
                made = (
                    None if blocking is True and blocking_timeout is None else wait_as_redis(blocking, blocking_timeout)
                )
                return plain._like(name, made)
        server = client or self._redis(name) if settings.enabled else NULL_SERVER
        lock = (CacheLock if settings.enabled else GrantedCacheLock)(
            server,
            name,
            expire=settings.expire if life is None else life,
            auto_renewal=(settings.auto_renewal and life is None) if auto_renewal is None else auto_renewal,
            max_hold=settings.max_hold if max_hold is None else max_hold,
            id=id,
            label=label,
            on_lost=on_lost,
            prefix=settings.key_prefix,
        )
        lock._wait = wait_as_redis(blocking, blocking_timeout)
        lock._any_thread = not thread_local
        return lock

    _plain: tuple[conf.Settings | None, CacheLock | None] = (None, None)

    def _plain_lock(self, settings: conf.Settings) -> CacheLock | None:
        """Return a lock with the defaults of the settings: those without options are made like it. None when servers differ by key."""
        servers = self._every_redis() if settings.enabled else [NULL_SERVER]
        plain = None
        if len(servers) == 1:
            plain = (CacheLock if settings.enabled else GrantedCacheLock)(
                servers[0],
                "any",
                expire=settings.expire,
                auto_renewal=settings.auto_renewal,
                max_hold=settings.max_hold,
                prefix=settings.key_prefix,
            )
        self._plain = settings, plain
        return plain

    def reset_all(self) -> int:
        """Force-release the locks of this cache and the leases of its values, and return how many there were.

        Touches nothing of other prefixes. Their holders are not stopped: they are told of the loss.
        """
        version, key = 9080706050, "redislockprobe"
        made = self.make_key(key, version)
        if key not in made:
            raise ImproperlyConfigured("reset_all() needs a KEY_FUNCTION that keeps the key in what it makes")
        versions = rf"(?:-?\d+|{re.escape(str(self.version))})"
        own = re.compile(re.escape(made).replace(str(version), versions).replace(key, ".*"), re.DOTALL)
        prefix = conf.get().key_prefix
        return sum(
            Lock(client, info.name, prefix=prefix).reset(info.fence)
            for client in self._every_redis()
            for info in list(held_locks(client, prefix))
            if own.fullmatch(info.name.removeprefix("cache:") if info.kind == "cache" else info.name)
        )

"""Locks on the server of a cache, named with its prefix and version."""

from __future__ import annotations

import re
from collections.abc import Callable

from django.core.exceptions import ImproperlyConfigured
from redis import Redis

from .. import conf
from ..core import Lock, held_locks
from ..core.granted import GrantedLock
from ..core.keys import Seconds, wait_of
from ..core.owner import new_id
from ..core.server import UNLOCKED
from .base import RedisBackend, warn_once

OF_TIMEOUT = (
    "cache.lock(timeout=...) is the lock's life, as in django-redis: it is not renewed, and the wait for it has no limit. Give "
    "blocking_timeout=... to limit the wait. It is django_redislock.lock(timeout=...) that means the wait."
)


class LocksMixin(RedisBackend):
    """`lock` and `reset_all`."""

    def lock(
        self,
        key: str,
        *,
        version: int | None = None,
        expire: Seconds | None = None,
        timeout: Seconds | None = None,
        auto_renewal: bool | None = None,
        max_hold: Seconds | None = None,
        id: str | None = None,
        blocking: bool = True,
        blocking_timeout: Seconds | None = None,
        thread_local: bool = True,
        sleep: float | None = None,
        client: Redis | None = None,
        label: str | None = None,
        on_lost: Callable[[Lock], object] | None = None,
    ) -> Lock:
        """Return a lock on this cache's server, named with its prefix and version.

        It takes the words of django-redis and those of python-redis-lock: `expire`, or `timeout`, is its life in seconds.
        With a life given it ends then, unless `auto_renewal` is true; without one it is renewed while its holder lives.
        `blocking_timeout` is how long ``with`` waits. With ``thread_local=False`` any thread may release it. `sleep` means
        nothing here, since nobody polls.

        Raises TypeError and ValueError for bad arguments, and when both `expire` and `timeout` are given.
        """
        if expire is not None and timeout is not None:
            raise TypeError("lock() takes expire or timeout, which both mean its life, and not both")
        life = timeout if expire is None else expire
        if timeout is not None and blocking_timeout is None and blocking:
            warn_once(OF_TIMEOUT)
        name = self._made(key, version)
        if id is None and not thread_local:
            id = new_id()
        settings = conf.get()
        if client is life is auto_renewal is max_hold is id is label is on_lost is None:  # type: ignore[comparison-overlap]
            of, plain = self._plain
            if of is not settings:
                plain = self._plain_lock(settings)
            if plain is not None:
                return plain._like(
                    name, None if blocking is True and blocking_timeout is None else wait_of(blocking, blocking_timeout)
                )
        server = client or self._redis(name) if settings.enabled else UNLOCKED
        return (Lock if settings.enabled else GrantedLock)(
            server,
            name,
            expire=settings.expire if life is None else life,
            auto_renewal=(settings.auto_renewal and life is None) if auto_renewal is None else auto_renewal,
            max_hold=settings.max_hold if max_hold is None else max_hold,
            id=id,
            blocking=blocking,
            timeout=blocking_timeout,
            label=label,
            on_lost=on_lost,
            prefix=settings.key_prefix,
        )

    _plain: tuple[conf.Settings | None, Lock | None] = (None, None)

    def _plain_lock(self, settings: conf.Settings) -> Lock | None:
        """Return a lock with the defaults of the settings: those without options are made like it. None when servers differ by key."""
        servers = self._every_redis() if settings.enabled else [UNLOCKED]
        plain = None
        if len(servers) == 1:
            plain = (Lock if settings.enabled else GrantedLock)(
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

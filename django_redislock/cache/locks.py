"""Locks on the server of a cache, named with its prefix and version."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Unpack

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured
from redis import Redis

from .. import conf
from ..core import Lock, held_locks
from ..core.driver.registry import server_of
from ..core.memory_server import GRANTS_ALL
from ..core.options import LockOptions
from ..core.redis_py import RedisPyLock
from ..core.validation import Seconds, unexpected, wait_as_redis
from .backends.base import RedisBackend, warn_once
from .lease.store import invalidate_matching

OPTIONS = LockOptions.__optional_keys__
OF_TIMEOUT = (
    "The timeout of cache.lock(timeout=...) is the expiry of the lock, as in django-redis: the lock is not renewed, "
    "and the wait for it has no limit. Give blocking_timeout=... to limit the wait. Only the timeout of "
    "django_redislock.lock(timeout=...) is the wait."
)


class LocksMixin(RedisBackend):
    """The locks of a cache: `lock`, `reset_all` and `locked_get_or_set`."""

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
        raise_on_release_error: bool = True,
        **options: Unpack[LockOptions],
    ) -> RedisPyLock:
        """Return a lock on this cache's server, named with its prefix and version.

        It takes the arguments of django-redis, in its order, and those of python-redis-lock: `expire`, or `timeout`,
        is the expiry in seconds. A lock with a given expiry ends then, unless `auto_renewal` is true, and a `timeout`
        above two minutes warns (`LongTimeoutWarning`); without one the lock is renewed while its holder lives. ``with``
        and ``acquire()`` wait as `blocking` and `blocking_timeout` (seconds) say. With ``thread_local=False`` any
        thread may release the lock. With ``raise_on_release_error=False`` a block whose lock was lost logs a warning at
        its end, and does not raise. `sleep` is ignored, because a release wakes the next waiter. A loss is reported to
        `on_lost`, as for `Lock`.

        Raises TypeError and ValueError for bad arguments, and TypeError when both `expire` and `timeout` are given.
        """
        if timeout is not None and blocking_timeout is None and blocking:
            warn_once(OF_TIMEOUT)
        name = self._redis_key(key, version)
        settings = conf.get()
        if wrong := options.keys() - OPTIONS:
            raise unexpected("lock", wrong, {*OPTIONS, "version", "timeout", "blocking", "blocking_timeout"})
        given = {option: value for option, value in options.items() if value is not None}
        if not given and client is None and timeout is None and thread_local and raise_on_release_error is True:
            of, plain = self._plain
            if of is not settings:
                plain = self._plain_lock(settings)
            if plain is not None:
                wait = (
                    None if blocking is True and blocking_timeout is None else wait_as_redis(blocking, blocking_timeout)
                )
                return plain._like(name, wait)
        defaults = settings.lock_options
        if timeout is not None or "expire" in given:  # a given expiry ends the lock, and so does redis-py's
            defaults = {option: value for option, value in defaults.items() if option not in ("expire", "auto_renewal")}
        server = client or self._client_for(name) if settings.enabled else GRANTS_ALL
        return RedisPyLock(
            server,
            name,
            timeout,
            sleep,
            blocking,
            blocking_timeout,
            thread_local,
            raise_on_release_error,
            **defaults | given,
        )

    _plain: tuple[conf.Settings | None, RedisPyLock | None] = (None, None)

    def _plain_lock(self, settings: conf.Settings) -> RedisPyLock | None:
        """Return the lock from which locks without options are copied; None if servers differ by key."""
        servers = self._all_clients() if settings.enabled else [GRANTS_ALL]
        plain = None
        if len(servers) == 1:
            plain = RedisPyLock(servers[0], "any", **settings.lock_options)
        self._plain = settings, plain
        return plain

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
        """Do as python-redis-lock's method of this name. New code uses `get_or_set`.

        `expire` is the expiry of the lock in seconds, `timeout` the expiry of the value. Raises ValueError when
        `value_creator` returns None, which counts as a missing value here, and the errors of `get_or_set` and `lock`.
        """

        def create() -> Any:
            value = value_creator()
            if value is None:
                raise ValueError("`value_creator` must return a value")
            return value

        if lock_key is None and id is None:
            value = self.get_or_set(key, create, timeout, version, expire=expire)  # type: ignore[call-arg]
            if value is not None:
                return value
        else:
            value = self.get(key, version=version)
            if value is not None:
                return value
        with self.lock(f"get_or_set:{key}" if lock_key is None else lock_key, version=version, expire=expire, id=id):
            value = self._get_from_primary(key, version=version)
            if value is None:
                value = create()
                self.set(key, value, timeout=timeout, version=version)
            return value

    def reset_all(self) -> int:
        """Force-release the locks of this cache and the leases of its values, and return how many there were.

        Does not touch locks of other prefixes. The holders are not stopped; they are notified of the loss. Raises
        ImproperlyConfigured if the KEY_FUNCTION does not keep the key, and LockBackendError if Redis does not answer.
        """
        version, key = 9080706050, "redislockprobe"
        probe = self.make_key(key, version)
        if key not in probe:
            raise ImproperlyConfigured("reset_all() needs a KEY_FUNCTION that keeps the key in what it makes")
        versions = rf"(?:-?\d+|{re.escape(str(self.version))})"
        own = re.compile(re.escape(probe).replace(str(version), versions).replace(key, ".*"), re.DOTALL)
        prefix, freed = conf.get().key_prefix, 0
        for client in self._all_clients():
            server = server_of(client)
            freed += sum(
                Lock(server, info.name, prefix=prefix).reset(info.fence)
                for info in list(held_locks(server, prefix))
                if own.fullmatch(info.name.removeprefix("cache:") if info.kind == "cache" else info.name)
            )
            if server.splits:  # the list does not contain the leases
                freed += server.run(invalidate_matching(server, prefix, own.fullmatch))
        return freed

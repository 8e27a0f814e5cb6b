"""What is computed must not be stored over what happened to the key meanwhile.

A value that is written needs nothing here: it is seen when the computed one is to be stored, and so is a new end of the old
one. But one that may have ended by then ends the leases, when it is there. `clear` takes the leases along, since they are in the same database. Only what may leave no value ends the leases, before
it happens: who computes from then on has seen what led to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from redis import Redis
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from .. import conf
from ..core.driver.server import Server
from ..exceptions import LockBackendError
from .backends.base import RedisBackend
from .lease.invalidate import invalidate, invalidate_pattern
from .lease.request import is_forbidden, is_refusal, log_level, note_logged

IGNORED: Any = None
"""What the base class returns when Redis cannot be reached and IGNORE_EXCEPTIONS is set."""
BATCH = 1000
"""Keys looked at, and deleted, in one go."""


class InvalidatingMixin(RedisBackend):
    """The methods that delete."""

    def delete(self, key: Any, version: int | None = None, *args: Any, **kwargs: Any) -> bool:
        """Delete the value; one that is being computed now will not be stored."""
        if not self._invalidate([self._redis_key(key, version, *args, **kwargs)]):
            return IGNORED  # type: ignore[no-any-return]
        return super().delete(key, version, *args, **kwargs)

    def delete_many(self, keys: Iterable[Any], version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Delete the values; those that are being computed now will not be stored."""
        keys = list(keys)
        if not self._invalidate([self._redis_key(key, version) for key in keys]):
            return IGNORED
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
        if not self._stores(timeout) and not self._invalidate([self._redis_key(key, version)]):  # it deletes
            return IGNORED
        answer = super().set(key, value, timeout, version, *args, **kwargs)
        if self._is_short(timeout) and not (answer is IGNORED and self._ignores_errors()):
            self._invalidate([self._redis_key(key, version)])
        return answer

    def add(
        self,
        key: Any,
        value: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        """Store the value if there is none."""
        added = super().add(key, value, timeout, version, *args, **kwargs)
        if added and self._is_short(timeout):
            self._invalidate([self._redis_key(key, version)])
        return added

    def set_many(
        self,
        data: dict[Any, Any],
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Store the values."""
        if not self._stores(timeout) and not self._invalidate([self._redis_key(key, version) for key in data]):
            return IGNORED
        answer = super().set_many(data, timeout, version, *args, **kwargs)
        if self._is_short(timeout):
            self._invalidate([self._redis_key(key, version) for key in data])
        return answer

    def touch(
        self, key: Any, timeout: float | None = DEFAULT_TIMEOUT, version: int | None = None, *args: Any, **kwargs: Any
    ) -> bool:
        """Give the value a new life; a timeout of 0 deletes it, and one that is being computed now will not be stored."""
        if not self._stores(timeout) and not self._invalidate([self._redis_key(key, version)]):
            return IGNORED  # type: ignore[no-any-return]
        return super().touch(key, timeout, version, *args, **kwargs)

    def incr_version(self, key: Any, delta: int = 1, version: int | None = None, *args: Any, **kwargs: Any) -> int:
        """Move the value to another version; one that is being computed now for this version will not be stored."""
        if not self._invalidate([self._redis_key(key, version)]):
            return IGNORED  # type: ignore[no-any-return]
        return super().incr_version(key, delta, version, *args, **kwargs)

    def clear(self) -> Any:
        """Delete everything in the database but the locks; what is being computed now will not be stored."""
        if not conf.get().enabled:
            return super().clear()
        if not self._invalidate_pattern(self._all_clients(), "*"):
            return IGNORED
        self._delete_all_but_locks("*")
        return True

    def _delete_all_but_locks(self, pattern: str, at_once: int | None = None) -> int:
        """Delete all keys that match the pattern and are no lock's, and return how many there were."""
        locks = b"{" + conf.get().key_prefix.encode()
        deleted = 0
        try:
            for client in self._all_clients():
                pipeline = client.pipeline(transaction=False)
                for key in client.scan_iter(match=pattern, count=at_once or BATCH):
                    raw = key if isinstance(key, bytes) else key.encode()
                    if raw.startswith((locks + b":", locks + b"}")):
                        continue
                    pipeline.unlink(key)
                    if len(pipeline) >= BATCH:
                        deleted += sum(pipeline.execute())
                deleted += sum(pipeline.execute())
        except RedisError:
            if not self._ignores_errors():
                raise
        return deleted

    def _is_short(self, timeout: float | None) -> bool:
        """Whether a value may end before a computation does that is under way: before those who wait for that give up."""
        seconds = self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
        if seconds is None or not self._stores(timeout):
            return False
        wait = self._settings.wait
        return wait is None or seconds < wait

    @property
    def _settings(self) -> conf.CacheSettings:
        raise NotImplementedError

    def _invalidate(self, keys: list[str]) -> bool:
        """End the leases of these values; False when no server can be reached and the base class ignores that."""
        settings = conf.get()
        if not settings.enabled:
            return True
        by_server: dict[Server, list[str]] = {}
        for key in keys:
            server = self._server_of(key)
            if server is not None:
                by_server.setdefault(server, []).append(key)
        level = {server: log_level(server, self._ignores_errors()) for server in by_server}
        reached = [
            self._run(server, invalidate(server, settings.key_prefix, its_keys, level[server]))
            for server, its_keys in by_server.items()
        ]
        return not reached or any(reached)

    def _invalidate_pattern(self, servers: list[Redis], pattern: str) -> bool:
        """End the leases of all values whose keys match a pattern, as Redis's KEYS does; False as in `_invalidate`."""
        settings = conf.get()
        if not settings.enabled:
            return True
        found = [server for client in servers if (server := self._server_at(client)) is not None]
        reached = [self._run(server, invalidate_pattern(server, settings.key_prefix, pattern)) for server in found]
        return not found or any(reached)

    def _run(self, server: Server, steps: Any) -> bool:
        if is_forbidden(server):
            return True
        try:
            server.run(steps)
        except LockBackendError as error:
            if is_refusal(error, server):
                return True
            if not self._ignores_errors():
                raise (error.__cause__ or error) from None
            note_logged(server)
            return not isinstance(error.__cause__, (ConnectionError, TimeoutError))
        return True


class ExpiringMixin(InvalidatingMixin):
    """What django-redis has beyond that."""

    def delete_pattern(
        self,
        pattern: str,
        version: int | None = None,
        prefix: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> int | None:
        """Delete all values whose keys match; those that are being computed now will not be stored."""
        made = self.client.make_pattern(pattern, version=version, prefix=prefix)  # type: ignore[attr-defined]
        if not self._invalidate_pattern(self._all_clients(), made):
            return None
        if conf.get().enabled and made[:1] in ("*", "?", "[", "{", "\\"):  # it may match the keys of locks
            return self._delete_all_but_locks(made, kwargs.get("itersize"))
        return super().delete_pattern(pattern, version, prefix, *args, **kwargs)  # type: ignore[misc, no-any-return]

    def expire(self, key: Any, timeout: Any, version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Give the value a new life in seconds; 0 deletes it."""
        if not self._expiring(key, version, timeout):
            return IGNORED
        return super().expire(key, timeout, version, *args, **kwargs)  # type: ignore[misc]

    def pexpire(self, key: Any, timeout: Any, version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Give the value a new life in milliseconds; 0 deletes it."""
        if not self._expiring(key, version, timeout):
            return IGNORED
        return super().pexpire(key, timeout, version, *args, **kwargs)  # type: ignore[misc]

    def expire_at(self, key: Any, when: Any, version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Let the value end at a time; one in the past deletes it."""
        if not self._ending(key, version, when, 1):
            return IGNORED
        return super().expire_at(key, when, version, *args, **kwargs)  # type: ignore[misc]

    def pexpire_at(self, key: Any, when: Any, version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Let the value end at a time; one in the past deletes it."""
        if not self._ending(key, version, when, 1000):
            return IGNORED
        return super().pexpire_at(key, when, version, *args, **kwargs)  # type: ignore[misc]

    def _expiring(self, key: Any, version: int | None, timeout: Any) -> bool:
        left = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        deletes = left is not DEFAULT_TIMEOUT and left is not None and left <= 0
        return not deletes or self._invalidate([self._redis_key(key, version)])

    def _ending(self, key: Any, version: int | None, when: Any, units: int) -> bool:
        ends = when.timestamp() if isinstance(when, datetime) else when / units
        deletes = ends <= time.time() + 1  # the server's clock may be ahead
        return not deletes or self._invalidate([self._redis_key(key, version)])

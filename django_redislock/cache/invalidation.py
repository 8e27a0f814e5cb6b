"""The methods that change values end leases, so that no computation stores its result over a later change.

A method that writes a value does not end its lease: the script that stores a computed value finds the written one, or a
new expiry of the stale one. A written value that may expire before the computation ends is an exception: its lease is
ended after the write, and if the value was gone by then, an older one may be stored, and is deleted. `delete` and
`delete_many` let the base class delete; then one script deletes again and ends the leases. So a value that was stored
in between is deleted, too, and no computation is stored that may be older than a value that was set in between. The
other methods that may remove a value end the lease of its key first. A computation that starts afterwards has read the
new state, so its result may be stored. In this process nobody follows an earlier leader any more: the outcome of that
one may be decided already.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from redis import Redis
from redis.exceptions import ConnectionError, NoPermissionError, RedisError, TimeoutError

from .. import conf
from ..core.clock import monotonic
from ..core.driver.server import Server
from ..core.keys import literal
from ..exceptions import LockBackendError
from .backends.base import RedisBackend
from .backends.overridden import note
from .lease.request import is_forbidden, is_refusal, log_level, note_logged
from .lease.single_flight import end_flights
from .lease.store import invalidate, invalidate_pattern
from .page_cache import RENDERING, deleted_with, may_match_pages, patterns_with

IGNORED: Any = None
"""The result of the base class when Redis cannot be reached and IGNORE_EXCEPTIONS is set."""
MARK = f".redislock.{RENDERING}".encode()
BATCH = 1000
"""Number of keys that one command scans, and one pipeline deletes."""


class InvalidatingMixin(RedisBackend):
    """The methods that delete or change values, and invalidate running computations."""

    def delete(self, key: Any, version: int | None = None, *args: Any, **kwargs: Any) -> bool:
        """Delete the value. A running computation of it is not stored. What belongs to a page is deleted first."""
        self._forget_pages([key], version, *args, **kwargs)
        deleted = super().delete(key, version, *args, **kwargs)
        if self._was_ignored(deleted) or not self._invalidate(
            [self._redis_key(key, version, *args, **kwargs)], delete=True
        ):
            return IGNORED  # type: ignore[no-any-return]
        return deleted

    def delete_many(self, keys: Iterable[Any], version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Delete the values. Running computations of them are not stored."""
        keys = list(keys)
        self._forget_pages(keys, version)
        deleted = super().delete_many(keys, version, *args, **kwargs)
        if self._was_ignored(deleted) or not self._invalidate(
            [self._redis_key(key, version) for key in keys], delete=True
        ):
            return IGNORED
        return deleted

    def set(
        self,
        key: Any,
        value: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Store the value; a running computation does not overwrite it. A timeout of 0 deletes it."""
        if self._overridden and note(self, key, value, timeout):
            return True
        # The base class deletes a value with a timeout of 0.
        if not self._stores(timeout) and not self._invalidate_deleted([key], version):
            return IGNORED
        began = monotonic()
        answer = super().set(key, value, timeout, version, *args, **kwargs)
        if not self._was_ignored(answer):
            self._invalidate_brief([self._redis_key(key, version)], timeout, began)
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
        """Store the value if there is none; a running computation does not overwrite it."""
        if self._overridden and note(self, key, value, timeout):
            return True
        began = monotonic()
        added = super().add(key, value, timeout, version, *args, **kwargs)
        if added:
            self._invalidate_brief([self._redis_key(key, version)], timeout, began)
        return added

    def set_many(
        self,
        data: dict[Any, Any],
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Store the values; running computations do not overwrite them. A timeout of 0 deletes them."""
        if not self._stores(timeout) and not self._invalidate_deleted(list(data), version):
            return IGNORED
        began = monotonic()
        answer = super().set_many(data, timeout, version, *args, **kwargs)
        self._invalidate_brief([self._redis_key(key, version) for key in data], timeout, began)
        return answer

    def touch(
        self, key: Any, timeout: float | None = DEFAULT_TIMEOUT, version: int | None = None, *args: Any, **kwargs: Any
    ) -> bool:
        """Give the value a new timeout in seconds. A timeout of 0 deletes it: a running computation is not stored."""
        if not self._stores(timeout) and not self._invalidate_deleted([key], version):
            return IGNORED  # type: ignore[no-any-return]
        return super().touch(key, timeout, version, *args, **kwargs)

    def incr_version(self, key: Any, delta: int = 1, version: int | None = None, *args: Any, **kwargs: Any) -> int:
        """Move the value to another version. A running computation of this version is not stored."""
        if not self._invalidate([self._redis_key(key, version)]):
            return IGNORED  # type: ignore[no-any-return]
        return super().incr_version(key, delta, version, *args, **kwargs)

    def clear(self) -> Any:
        """Delete all keys of the database except the locks. Running computations are not stored.

        Where the user of Redis may use the keys of this cache only, those are deleted.
        """
        if not self._invalidate_pattern(self._all_clients(), "*"):
            return IGNORED
        return IGNORED if self._delete_all_but_locks("*") is None else True

    def pattern_of_own_keys(self) -> str:
        """Return the pattern of Redis for all keys of this cache; "*" if the KEY_FUNCTION does not keep the key."""
        mark = "redislock-any-key"
        made = literal(self._redis_key(mark, 1))
        return made.replace(f":1:{mark}", ":*").replace(mark, "*") if mark in made else "*"

    def _delete_all_but_locks(self, *patterns: str, batch: int | None = None, is_again: bool = False) -> int | None:
        """Delete all keys that match one of the patterns, except those of locks; return the number of deleted keys, or
        None after an error that the base class ignores."""
        locks = b"{" + conf.get().key_prefix.encode()
        deleted, again = 0, False
        try:
            for client, pattern in [(client, each) for client in self._clients_to_scan() for each in patterns]:
                pipeline = client.pipeline(transaction=False)
                for key in client.scan_iter(match=pattern, count=batch or BATCH):
                    raw = key if isinstance(key, bytes) else key.encode()
                    if raw.startswith((locks + b":", locks + b"}")):
                        continue
                    again = again or MARK in raw
                    pipeline.unlink(key)
                    if len(pipeline) >= BATCH:
                        deleted += sum(pipeline.execute())
                deleted += sum(pipeline.execute())
        except RedisError as error:
            own = self.pattern_of_own_keys()
            if isinstance(error, NoPermissionError) and "*" in patterns and own != "*":
                return self._delete_all_but_locks(own)
            if not self._ignores_errors():
                raise
            return IGNORED  # type: ignore[no-any-return]
        if again and not is_again:
            # A page whose mark was deleted only now may have been stored behind the scan. None can be from here on.
            deleted += self._delete_all_but_locks(*patterns, batch=batch, is_again=True) or 0
        return deleted

    def _invalidate_deleted(self, keys: list[Any], version: int | None) -> bool:
        """Do as `_invalidate` before values are deleted by a method that is not named so."""
        self._forget_pages(keys, version)
        return self._invalidate([self._redis_key(key, version) for key in keys])

    def _forget_pages(self, keys: list[Any], version: int | None, *args: Any, **kwargs: Any) -> None:
        """Delete what belongs to the pages among the keys that are about to be deleted, and end their renderings."""
        names, leases = deleted_with(keys)
        if not names:
            return
        if args or kwargs:
            for name in names:
                super().delete(name, version, *args, **kwargs)
        else:
            super().delete_many(names, version)
        self._invalidate([self._redis_key(lease, version, *args, **kwargs) for lease in leases])

    def _invalidate_brief(self, keys: list[str], timeout: float | None, began: float) -> None:
        """End the leases of values that were written since `began`, if they may expire before a computation ends."""
        seconds = self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
        wait = self._settings.wait  # seconds after which the waiters for a computation give up
        if seconds is None or not self._stores(timeout) or (wait is not None and seconds >= wait):
            return
        self._invalidate(keys)
        if monotonic() >= began + seconds:  # the value has expired: an older one may have been stored before this
            self._invalidate(keys, delete=True)

    @property
    def _settings(self) -> conf.CacheSettings:
        raise NotImplementedError

    def _was_ignored(self, answer: object) -> bool:
        """Whether the base class could not reach Redis and ignored that."""
        return answer is IGNORED and self._ignores_errors()

    def _invalidate(self, keys: list[str], *, delete: bool = False) -> bool:
        """End the leases of these values, and perhaps delete them; False when no server can be reached and the base
        class ignores errors."""
        settings = conf.get()
        if not settings.enabled:
            return True
        by_server: dict[Server, list[str]] = {}
        for key in keys:
            server = self._server_of(key)
            if server is not None:
                by_server.setdefault(server, []).append(key)
        reached = []
        for server, its_keys in by_server.items():
            level = log_level(server, self._ignores_errors())
            reached.append(self._run(server, invalidate(server, settings.key_prefix, its_keys, level, delete=delete)))
            end_flights(server, its_keys)
        return not reached or any(reached)

    def _invalidate_pattern(self, servers: list[Redis], pattern: str) -> bool:
        """End the leases of all values whose keys match a pattern of Redis; False as in `_invalidate`."""
        settings = conf.get()
        if not settings.enabled:
            return True
        found = [server for client in servers if (server := self._server_at(client)) is not None]
        reached = [self._run(server, invalidate_pattern(server, settings.key_prefix, pattern)) for server in found]
        for server in found:
            end_flights(server)
        return not found or any(reached)

    def _run(self, server: Server, operation: Any) -> bool:
        if is_forbidden(server):
            return True
        try:
            server.run(operation)
        except LockBackendError as error:
            if is_refusal(error, server):
                return True
            self._raise_unless_ignored(error)
            note_logged(server)
            return not isinstance(error.__cause__, (ConnectionError, TimeoutError))
        return True


class DjangoRedisInvalidatingMixin(InvalidatingMixin):
    """The further methods of django-redis that delete or change values."""

    def delete_pattern(
        self,
        pattern: str,
        version: int | None = None,
        prefix: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> int | None:
        """Delete all values whose keys match the pattern; return their number. Running computations are not stored."""
        make: Any = self.client.make_pattern  # type: ignore[attr-defined]
        patterns = [make(each, version=version, prefix=prefix) for each in patterns_with(pattern)]
        if not all(self._invalidate_pattern(self._all_clients(), each) for each in patterns):
            return None
        # It may match the keys of locks, or pages.
        if (conf.get().enabled and patterns[0][:1] in ("*", "?", "[", "{", "\\")) or may_match_pages(pattern):
            return self._delete_all_but_locks(*patterns, batch=kwargs.get("itersize"))
        return super().delete_pattern(pattern, version, prefix, *args, **kwargs)  # type: ignore[misc, no-any-return]

    def expire(self, key: Any, timeout: Any, version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Give the value a new timeout in seconds; 0 deletes it."""
        if not self._invalidate_if_deleting(key, version, timeout):
            return IGNORED
        return super().expire(key, timeout, version, *args, **kwargs)  # type: ignore[misc]

    def pexpire(self, key: Any, timeout: Any, version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Give the value a new timeout in milliseconds; 0 deletes it."""
        if not self._invalidate_if_deleting(key, version, timeout):
            return IGNORED
        return super().pexpire(key, timeout, version, *args, **kwargs)  # type: ignore[misc]

    def expire_at(self, key: Any, when: Any, version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Let the value expire at a time; a time in the past deletes it."""
        if not self._invalidate_if_past(key, version, when, 1):
            return IGNORED
        return super().expire_at(key, when, version, *args, **kwargs)  # type: ignore[misc]

    def pexpire_at(self, key: Any, when: Any, version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Let the value expire at a time; a time in the past deletes it."""
        if not self._invalidate_if_past(key, version, when, 1000):
            return IGNORED
        return super().pexpire_at(key, when, version, *args, **kwargs)  # type: ignore[misc]

    def _invalidate_if_deleting(self, key: Any, version: int | None, timeout: Any) -> bool:
        left = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        deletes = left is not DEFAULT_TIMEOUT and left is not None and left <= 0
        return not deletes or self._invalidate_deleted([key], version)

    def _invalidate_if_past(self, key: Any, version: int | None, when: Any, units: int) -> bool:
        ends = when.timestamp() if isinstance(when, datetime) else when / units
        deletes = ends <= time.time() + 1  # the server's clock may be ahead
        return not deletes or self._invalidate_deleted([key], version)

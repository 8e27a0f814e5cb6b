"""Locks with the words of redis-py: for `lock_class` of its clients, and for `cache.lock()`."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Self

from ..exceptions import AlreadyAcquired, LockLost, LongTimeoutWarning, NotAcquired
from . import events, operations
from .async_lock import AsyncLock, coroutine_function
from .base import BaseLock
from .clock import monotonic
from .driver.effects import Operation, Sleep
from .lease import Lease
from .lock import Lock
from .operations import AcquireRequest
from .records import marked, new_mark
from .validation import AS_MADE, AsMade, Seconds, check_expire, check_flag, check_id, wait_as_redis

RETRY_BY_TOKEN = 0.1
"""Seconds between two tries for a lock that is held by the same token, because the queue knows only one entry of it."""

NOT_RELEASED = (
    "Lock %r was no longer held at the end of its block, so another holder may have worked at the same time (%s). The "
    "block raises no error, because raise_on_release_error is False."
)

LONG_TIMEOUT = 120
NOT_RENEWED = (
    "A lock with a timeout is not renewed, so after a kill of its holder this one stays for {0:g} s. Leave the timeout "
    "out: then the lock is renewed while its holder lives, and ends 30 s after a kill. If it shall end after {0:g} s, "
    "give auto_renewal=False. Only the first such lock of a process warns."
)
NOT_CALLERS = {"django_redislock", "redis", "django_redis"}
"""The packages whose frames are none of the line that gave the timeout."""


_warned = False


def _warn_of_long_timeout(seconds: float) -> None:
    global _warned
    if _warned:
        return
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in NOT_CALLERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(NOT_RENEWED.format(seconds), LongTimeoutWarning, stacklevel=level)
    _warned = True  # where warnings are errors, each such lock is one


@dataclass(slots=True)
class Token:
    """An owner id that the caller chose for one acquisition.

    Of two acquisitions by the same token, one holds the lock, as in redis-py. For the scripts they are one owner that
    repeats a call, so each acquisition adds a random mark to its record in Redis.
    """

    id: str
    mark: bytes
    recorded: bool = False
    """Whether the lock has this very acquisition's mark, because an earlier call was granted and its reply was lost."""
    refused: bool = False
    """Whether the server answered that another acquisition by the token held the lock before."""


class RedisPyWords(BaseLock):
    """What the locks for threads and for asyncio have in common: redis-py's arguments, in its order."""

    def __init__(
        self,
        redis: Any,
        name: str,
        timeout: Seconds | None = None,
        sleep: float | None = None,
        blocking: bool = True,
        blocking_timeout: Seconds | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        expire: Seconds | None = None,
        **options: Any,
    ) -> None:
        if timeout is not None:
            if expire is not None:
                raise TypeError("a lock takes expire or timeout, but not both: each means its expiry")
            expire = check_expire(timeout, "timeout")
            if expire > LONG_TIMEOUT and "auto_renewal" not in options:
                _warn_of_long_timeout(expire)
        if options.get("reentrant") and not thread_local:
            raise TypeError("a re-entrant lock needs thread_local=True: else every thread would enter it again")
        super().__init__(redis, name, **{"auto_renewal": expire is None, "expire": expire, **options})
        self._wait = wait_as_redis(blocking, blocking_timeout)
        self._any_thread = not thread_local
        self._raises_at_exit = check_flag(raise_on_release_error, "raise_on_release_error")
        self._tokens: dict[Any, Token] = {}  # of the acquisitions that are under way, by acquirer

    def _copy(self, **changes: Any) -> Self:
        return super()._copy(_tokens={}, **changes)

    def _acquire_as_redis(
        self,
        acquirer: Any,
        sleep: float | bool | None,
        blocking: bool | AsMade | None,
        timeout: Seconds | AsMade | None,
        blocking_timeout: Seconds | None,
        token: str | bytes | None,
    ) -> Operation[bool]:
        if isinstance(sleep, bool):  # the first arguments of python-redis-lock's: acquire(blocking, timeout)
            if blocking is not None:
                timeout, blocking = blocking, None
            blocking = sleep if blocking is None else blocking
        seconds = self._wait.seconds(blocking, timeout, blocking_timeout)
        try:
            if token is not None:
                return (yield from self._acquire_by(acquirer, token, seconds))
            return (yield from self._acquire(acquirer, seconds))
        except AlreadyAcquired:
            if seconds != 0:
                raise
            return False

    def _acquire_by(self, acquirer: Any, token: object, timeout: float | None) -> Operation[bool]:
        """Acquire the lock with the token as the id of this acquisition. The same token keeps itself out."""
        until = math.inf if timeout is None else monotonic() + timeout
        by = Token(check_id(token.decode("latin-1") if isinstance(token, bytes) else token, "token"), new_mark())
        while True:
            (stored,) = yield from operations.read(self._server, self.name, [self._keys], until)
            by.recorded = stored is not None and by.mark in stored.record
            left = None if timeout is None else max(0.0, until - monotonic())
            if stored is None or stored.id != by.id or by.recorded or acquirer in self._leases:
                by.refused = False
                self._tokens[acquirer] = by
                try:
                    if (yield from self._acquire(acquirer, left)):
                        return True
                finally:
                    self._tokens.pop(acquirer, None)
                if not by.refused:
                    return False
            elif left == 0.0:
                return False
            else:
                yield Sleep(RETRY_BY_TOKEN if left is None else min(RETRY_BY_TOKEN, left))

    def _new_request(self, acquirer: Any, timeout: float | None) -> AcquireRequest:
        request, by = super()._new_request(acquirer, timeout), self._tokens.get(acquirer)
        if by is not None:
            request.lease.id, request.attempt.mark = by.id, by.mark
            request.attempt.goes_on = request.given_id = True
            request.record = marked(self._record(), by.mark)
        return request

    def _accepts(self, request: AcquireRequest) -> bool:
        by = self._tokens.get(request.lease.acquirer)
        if by is None:
            return super()._accepts(request)
        by.refused = request.lease.shared and not by.recorded
        if by.refused:
            request.attempt.repeated = False  # nothing is given back: the same attempt goes on
        return not by.refused

    def _extend_by(
        self, acquirer: Any, additional_time: Seconds | None, replace_ttl: bool, expire: Seconds | None
    ) -> Operation[Literal[True]]:
        if additional_time is None or replace_ttl:
            return (yield from self._extend(acquirer, expire if additional_time is None else additional_time))
        if expire is not None:
            raise TypeError("extend() takes additional_time or expire, and not both")
        seconds = check_expire(additional_time, "additional_time")
        holder = yield from self._owner()
        mine = holder is not None and holder.id == self._require_lease(acquirer).id
        return (yield from self._extend(acquirer, holder.ttl + seconds if mine and holder is not None else None))

    def _exit(self, acquirer: Any, error: BaseException | None) -> Operation[None]:
        leave = super()._exit(acquirer, error)
        return leave if self._raises_at_exit else self._log_loss(leave)

    def _log_loss(self, leave: Operation[None]) -> Operation[None]:
        try:
            yield from leave
        except (LockLost, NotAcquired) as failure:
            events.log.warning(NOT_RELEASED, self.name, failure)

    def _lease_of(self, acquirer: Any) -> Lease | None:
        """Return the acquirer's acquisition; if any thread may release it, else the newest one that is not lost.

        It was the oldest one: after a loss, the next holder's block raised LockLost, and the loser released its lock.
        """
        own = super()._lease_of(acquirer)
        if own is not None or not self._any_thread:
            return own
        leases: list[Lease] = [lease for lease in list(self._leases.values()) if not lease.inherited_by_fork]
        return max(leases, key=lambda lease: (lease.loss is None, lease.acquired), default=None)

    def _lease_to_leave(self, acquirer: Any) -> Lease:
        self._raise_if_ended(acquirer)  # another thread released it, and what a third one holds is not this block's
        return super()._lease_to_leave(acquirer)


class RedisPyLock(RedisPyWords, Lock):
    """A lock for threads with the words of redis-py: ``client.lock(name, lock_class=RedisPyLock)``.

    `timeout` is the expiry in seconds: the lock ends then, and above two minutes it warns (`LongTimeoutWarning`).
    Without it, the watchdog renews the lock while its holder lives. ``with`` and ``acquire()`` wait as `blocking` and
    `blocking_timeout` (seconds) say. With ``thread_local=False`` any thread may release the lock that one of them
    acquired. With ``raise_on_release_error=False`` a block whose lock was lost logs a warning at its end, and does not
    raise. `sleep` is ignored, because a release wakes the next waiter.

    Raises TypeError and ValueError for bad arguments. All errors derive from ``redis.exceptions.LockError``.
    """

    def acquire(  # type: ignore[override]
        self,
        sleep: float | bool | None = None,
        blocking: bool | AsMade | None = None,
        blocking_timeout: Seconds | None = None,
        token: str | bytes | None = None,
        *,
        timeout: Seconds | AsMade | None = AS_MADE,
    ) -> bool:
        """Acquire the lock; return whether it was acquired.

        Waits up to `blocking_timeout` seconds (or `timeout`, where None is for ever); without `blocking` it tries once.
        Arguments that are not given come from the lock. `token` is the id of this acquisition; of two acquisitions by
        one token, one holds the lock. `sleep` is ignored, because a release wakes the next waiter; True or False in its
        place are the first argument of python-redis-lock's ``acquire(blocking, timeout)``.

        Raises what `Lock.acquire` does.
        """
        acquirer = self._acquirer()
        had = self._holding(acquirer)
        try:
            return self._server.carry_out(
                self._acquire_as_redis(acquirer, sleep, blocking, timeout, blocking_timeout, token)
            )
        except BaseException:
            self._take_back(acquirer, had)
            raise

    def extend(  # type: ignore[override]
        self, additional_time: Seconds | None = None, replace_ttl: bool = False, *, expire: Seconds | None = None
    ) -> Literal[True]:
        """Add so many seconds to the remaining time of the held lock, and return True.

        With `replace_ttl`, or given as `expire`, they replace the remaining time; without any, the lock gets its own
        `expire` again. Only the object that acquired the lock can shorten its expiry.

        Raises NotAcquired, LockLost and LockBackendError as `release` does.
        """
        return self._server.carry_out(self._extend_by(self._acquirer(), additional_time, replace_ttl, expire))


class AsyncRedisPyLock(RedisPyWords, AsyncLock):
    """A lock for asyncio with the words of redis-py: ``aclient.lock(name, lock_class=AsyncRedisPyLock)``.

    `RedisPyLock`, its equivalent for threads, describes the arguments.
    """

    @coroutine_function
    def acquire(  # type: ignore[override]
        self,
        sleep: float | bool | None = None,
        blocking: bool | AsMade | None = None,
        blocking_timeout: Seconds | None = None,
        token: str | bytes | None = None,
        *,
        timeout: Seconds | AsMade | None = AS_MADE,
    ) -> Coroutine[Any, Any, bool]:
        """Acquire the lock for this task, and return whether it was acquired, as `RedisPyLock.acquire` does."""
        return self._run(
            lambda acquirer: self._acquire_as_redis(acquirer, sleep, blocking, timeout, blocking_timeout, token)
        )

    @coroutine_function
    def extend(  # type: ignore[override]
        self, additional_time: Seconds | None = None, replace_ttl: bool = False, *, expire: Seconds | None = None
    ) -> Coroutine[Any, Any, Literal[True]]:
        """Add so many seconds to the remaining time of the held lock, as `RedisPyLock.extend` does."""
        return self._run(lambda acquirer: self._extend_by(acquirer, additional_time, replace_ttl, expire))

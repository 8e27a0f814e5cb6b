"""The lock, for threads."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from redis import Redis

from ..exceptions import AcquireTimeout, AlreadyAcquired, LockError, LockLost, LossRecord, NotAcquired
from . import events, owner, protocol
from .keys import Seconds, check_expire, check_id, check_name, check_prefix, check_wait, lock_keys
from .lease import GONE, Lease
from .owner import LockInfo
from .server import Server, server_of
from .watchdog import watchdog

DEFAULT_EXPIRE = 30.0


class Lock:
    """A lock of a name in Redis: at most one holder at a time.

    `expire` is its life in seconds without renewal; with `auto_renewal` a watchdog renews it while its holder lives, at
    most for `max_hold` seconds. `blocking` and `timeout` are what ``with`` acquires by. `id` is the owner id to use: give
    that of a held lock to release or extend it from elsewhere. `label` is told to those who ask who holds the lock.
    `on_lost(lock)` is called, from another thread perhaps, when the lock is lost while it is believed to be held.

    One object may be shared by threads: each has its own acquisition.

    Raises TypeError and ValueError for bad arguments.
    """

    def __init__(
        self,
        client: Redis | Server,
        name: str,
        *,
        expire: Seconds | None = None,
        auto_renewal: bool = True,
        max_hold: Seconds | None = None,
        id: str | None = None,
        blocking: bool = True,
        timeout: Seconds | None = None,
        label: str | None = None,
        on_lost: Callable[[Any], object] | None = None,
        kind: str = "lock",
        prefix: str = "redislock",
    ) -> None:
        self._server = server_of(client)
        self.name = check_name(name)
        self._keys = lock_keys(check_prefix(prefix), name)
        self.expire = DEFAULT_EXPIRE if expire is None else check_expire(expire)
        if not isinstance(auto_renewal, bool):
            raise TypeError(f"auto_renewal must be True or False, not {auto_renewal!r}")
        self.auto_renewal = auto_renewal
        self.max_hold = None if max_hold is None else check_expire(max_hold, "max_hold")
        self._given_id = None if id is None else check_id(id)
        self._with_timeout = check_wait(blocking, timeout)
        if label is not None and not isinstance(label, str):
            raise TypeError(f"label must be a str, not {type(label).__name__}")
        self.label = label or ""
        if on_lost is not None and not callable(on_lost):
            raise TypeError("on_lost must be callable")
        self.on_lost = on_lost
        self.kind = kind
        self._leases: dict[Any, Lease] = {}  # by the thread that acquired

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    # Taking and giving back

    def acquire(self, blocking: bool = True, timeout: Seconds | None = None) -> bool:
        """Acquire the lock, and tell whether it was acquired.

        Waits up to `timeout` seconds, for ever with None; `blocking=False` tries once. Raises AlreadyAcquired when this
        thread holds it through this object, and LockBackendError when Redis cannot answer.
        """
        return self._acquire(check_wait(blocking, timeout))

    def _acquire(self, timeout: float | None) -> bool:
        thread = threading.current_thread()
        for other, before in list(self._leases.items()):
            # With an id of the caller's choice Redis cannot tell this object's threads apart.
            if (other is thread or self._given_id) and not before.foreign and before.loss is None:
                raise AlreadyAcquired(self.name)
        lease = self._new_lease(self._given_id or owner.new_id())
        claim = protocol.Claim(lease, owner.record(self.kind, self.label, self.expire, self.auto_renewal), timeout)
        try:
            if not self._server.run(protocol.acquire(claim, self._server.room.open)):
                return False
            self._leases[thread] = lease
            if self.auto_renewal:
                watchdog.add(lease)
            self._tell("acquired", lease)
        except BaseException:
            if lease.fence:  # acquired, and interrupted on the way out
                watchdog.remove(lease)
                self._forget(lease)
                with suppress(LockError):
                    self._released(lease)
            raise
        return True

    def release(self) -> None:
        """Release the lock and wake the next waiter.

        Raises NotAcquired when this thread does not hold it, LockLost when it was lost meanwhile, and LockBackendError when
        Redis cannot answer: then it may be repeated, and else the lock ends by its expiry.
        """
        lease = self._own()
        watchdog.remove(lease)
        if lease.loss is None and not self._released(lease):
            lease.lose(GONE)
        self._forget(lease)
        self._raise_loss(lease)
        self._tell("released", lease)

    def __enter__(self) -> Lock:
        if not self._acquire(self._with_timeout):
            raise AcquireTimeout(self.name, self._with_timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._leases.get(threading.current_thread())
        if lease is not None and lease.foreign:  # a forked child leaves its copy of the parent's block
            self._forget(lease)
            return
        try:
            self.release()
        except LockError as failure:
            if error is None:
                raise
            events.log.warning("Lock %r could not be released after its block failed: %s", self.name, failure)
            _chain(error, failure)

    def extend(self, expire: Seconds | None = None) -> None:
        """Give the held lock a new life of `expire` seconds from now (None: of its own).

        Raises NotAcquired, LockLost and LockBackendError as `release` does.
        """
        seconds = None if expire is None else check_expire(expire)
        lease = self._own()
        if lease.loss is None:
            lease.expire = lease.expire if seconds is None else seconds
            if not self._server.run(protocol.renew(lease)):
                watchdog.remove(lease)
                lease.lose(GONE)
        self._raise_loss(lease)

    # Asking Redis

    def owner(self) -> LockInfo | None:
        """Return who holds the lock now, or None. Raises LockBackendError when Redis cannot answer."""
        return self._server.run(protocol.read([self.name], [self._keys]))[0]

    def locked(self) -> bool:
        """Return whether anybody holds the lock now."""
        return self.owner() is not None

    def owned(self) -> bool:
        """Return whether this thread's acquisition (or the id given) holds the lock, asked of Redis now."""
        lease = self._leases.get(threading.current_thread())
        mine = lease.id if lease is not None and not lease.foreign else self._given_id
        holder = self.owner()
        return holder is not None and holder.id == mine

    def ttl(self) -> float | None:
        """Return the seconds left of the lock's life, or None when nobody holds it."""
        holder = self.owner()
        return None if holder is None else holder.ttl

    def reset(self, fence: int | None = None, by: object = None) -> bool:
        """Take the lock from whoever holds it, wake the next waiter, and tell whether it was held.

        With `fence`, only the acquisition of that number loses it. The former holder is not stopped: it is told of the loss
        within a third of its life. `by` is who wants it (a user, or words): told in the log and to listeners.
        """
        freed = self._server.run(protocol.reset(self.name, self._keys, fence)) == 1
        if freed:
            what, who = "any" if fence is None else fence, by or "this program"
            message = "Lock %r (fence %s) was force-released by %s."
            events.emit("force_released", message, self.name, what, who, name=self.name, fence=fence, user=by)
        return freed

    # This acquisition, known without asking

    @property
    def id(self) -> str | None:
        """The owner id of this acquisition: the right to extend and release it."""
        lease = self._latest()
        return self._given_id if lease is None else lease.id

    @property
    def fence(self) -> int:
        """The fencing number of this acquisition: larger than every earlier one of the same name.

        Raises NotAcquired.
        """
        lease = self._latest()
        if lease is None:
            raise NotAcquired(self.name)
        return lease.fence

    @property
    def lost(self) -> LossRecord | None:
        """Why this acquisition was lost, or None while it is held; local and free."""
        lease = self._latest()
        return None if lease is None else lease.loss

    def raise_if_lost(self) -> None:
        """Raise LockLost if this acquisition was lost: call it before each irreversible step. Local and free."""
        lease = self._own()
        self._raise_loss(lease)

    def _new_lease(self, id: str) -> Lease:
        thread = threading.current_thread()
        return Lease(self._server, self.name, self._keys, id, self.expire, thread, self.max_hold, weakref.ref(self))

    def _own(self) -> Lease:
        """Return this thread's acquisition, or that of the given id, wherever it was acquired."""
        lease = self._leases.get(threading.current_thread())
        if lease is not None and not lease.foreign:
            return lease
        if self._given_id is None or lease is not None:
            raise NotAcquired(self.name)
        lease = self._new_lease(self._given_id)
        lease.begin(0, time.monotonic())
        return lease

    def _latest(self) -> Lease | None:
        """Return this thread's acquisition, or the last one of any thread, for a look at it."""
        leases = list(self._leases.values())
        return self._leases.get(threading.current_thread()) or (leases[-1] if leases else None)

    def _released(self, lease: Lease) -> bool:
        try:
            return self._server.run(protocol.release(lease))
        except LockError:
            raise
        except BaseException:  # interrupted: it may be repeated safely, and should not be left to its expiry
            with suppress(LockError):
                self._server.run(protocol.release(lease))
            raise

    def _tell(self, event: str, lease: Lease) -> None:
        events.emit(
            event, "Lock %r " + event + " (fence %d).", self.name, lease.fence, name=self.name, fence=lease.fence
        )

    def _forget(self, lease: Lease) -> None:
        if self._leases.get(lease.owner) is lease:
            del self._leases[lease.owner]

    def _raise_loss(self, lease: Lease) -> None:
        if lease.loss is not None:
            if lease.fence == 0:  # an id given, not acquired here
                raise NotAcquired(self.name)
            raise LockLost(self.name, lease.loss)


def _chain(error: BaseException, failure: BaseException) -> None:
    """Hang the failure under the end of the error's own chain, so that a traceback shows both."""
    while error.__context__ is not None:
        error = error.__context__
    if error is not failure:
        error.__context__ = failure

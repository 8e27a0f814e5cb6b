"""Locks that everybody gets who asks: what ``ENABLED: False`` gives out. Each tells of its caller's acquisition what was asked for."""

from __future__ import annotations

import time
from contextlib import suppress

from ..exceptions import NotAcquired
from .async_lock import AsyncLock, AsyncRLock
from .base import BaseLock
from .driver.effects import Operation
from .lease import Lease
from .lock import Lock, RLock
from .records import LockInfo, parse
from .reentrant import ReentrantLease


class GrantedLease(Lease):
    """An acquisition that does not end before its release, and that nobody renews."""

    @property
    def loss(self) -> None:
        """Nothing is lost."""
        return


class GrantedReentrantLease(GrantedLease, ReentrantLease):
    """One that its owner may enter again."""


class Granted(BaseLock):
    """Makes a lock one of `UNLOCKED`, which remembers nothing."""

    _lease_kind = GrantedLease

    def _watch(self, lease: Lease) -> None:
        """Let it last until its release."""

    def _owner(self) -> Operation[LockInfo | None]:
        yield from ()
        with suppress(NotAcquired):
            return self._told(self._latest())
        return None

    def _owned(self) -> Operation[bool]:
        yield from ()
        with suppress(NotAcquired):
            return self._told(self._own()) is not None
        return False

    def _told(self, lease: Lease | None) -> LockInfo | None:
        if lease is None or not lease.fence:
            return None
        acquired, now = lease.fence // 1000, int(time.time() * 1000)
        value = b"%s\n%d\n%d\n%s" % (lease.id.encode(), lease.fence, acquired, self._record())
        held = parse(self.name, value, round(lease.expire * 1000), 0, now)
        return None if held is None else held.info


class GrantedLock(Granted, Lock):
    """A lock for threads that is granted to everybody."""


class GrantedRLock(Granted, RLock):
    """A re-entrant one."""

    _lease_kind = GrantedReentrantLease


class GrantedAsyncLock(Granted, AsyncLock):
    """A lock for asyncio that is granted to everybody."""


class GrantedAsyncRLock(Granted, AsyncRLock):
    """A re-entrant one."""

    _lease_kind = GrantedReentrantLease

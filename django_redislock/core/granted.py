"""Locks that are granted to every caller, for ``ENABLED: False``. Each answers from its caller's own acquisition."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from ..exceptions import NotAcquired
from .async_lock import AsyncLock, AsyncRLock
from .base import BaseLock
from .driver.effects import Operation
from .lease import Lease
from .lock import Lock, RLock
from .records import LockInfo, parse
from .reentrant import ReentrantLease


class GrantedLease(Lease):
    """An acquisition that ends at its release and is not renewed."""

    @property
    def loss(self) -> None:
        """Nothing is lost."""
        return


class GrantedReentrantLease(GrantedLease, ReentrantLease):
    """An acquisition that its acquirer may enter again."""


class Granted(BaseLock):
    """Makes a lock that runs on the null server, which remembers nothing."""

    _lease_kind = GrantedLease

    def _watch(self, lease: Lease) -> None:
        """Watch nothing, because the acquisition lasts until its release."""

    def _owner(self) -> Operation[LockInfo | None]:
        yield from ()
        with suppress(NotAcquired):
            return self._info(self._visible_lease())
        return None

    def _owned(self, acquirer: Any) -> Operation[bool]:
        yield from ()
        with suppress(NotAcquired):
            return self._info(self._require_lease(acquirer)) is not None
        return False

    def _info(self, lease: Lease | None) -> LockInfo | None:
        if lease is None or not lease.fence:
            return None
        acquired, now = lease.fence // 1000, int(time.time() * 1000)
        value = b"%s\n%d\n%d\n%s" % (lease.id.encode(), lease.fence, acquired, self._record())
        stored = parse(self.name, value, round(lease.expire * 1000), 0, now)
        return None if stored is None else stored.info


class GrantedLock(Granted, Lock):
    """A lock for threads that is granted to every caller."""


class GrantedRLock(Granted, RLock):
    """A re-entrant lock that is granted to every caller."""

    _lease_kind = GrantedReentrantLease


class GrantedAsyncLock(Granted, AsyncLock):
    """A lock for asyncio that is granted to every caller."""


class GrantedAsyncRLock(Granted, AsyncRLock):
    """A re-entrant lock that is granted to every caller."""

    _lease_kind = GrantedReentrantLease

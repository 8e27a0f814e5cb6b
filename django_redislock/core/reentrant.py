"""Re-entrance: counted in the process, so that no repeated command can count twice."""

from __future__ import annotations

import os
import weakref
from typing import Any

from .base import BaseLock
from .keys import LockKeys
from .lease import Lease
from .server import Server
from .steps import Steps

# The acquisitions of this process that may be entered again; each RLock object that entered keeps its own alive.
_entered: weakref.WeakValueDictionary[tuple[Server, LockKeys, Any], Lease] = weakref.WeakValueDictionary()


class Reentrant(BaseLock):
    """Makes a lock re-entrant for the thread or task that holds it."""

    def _key(self) -> tuple[Server, LockKeys, Any]:
        return self._server, self._keys, self._me()

    def _inside(self) -> Lease | None:
        """Return the acquisition that the caller is in, and forget one that it left through another object."""
        lease = _entered.get(self._key())
        if lease is None:
            before = self._leases.get(self._me())
            if before is not None and not before.foreign:
                del self._leases[self._me()]
        return lease

    def _acquire(self, timeout: float | None, listening: bool) -> Steps[bool]:
        lease = self._inside()
        if lease is None:
            acquired = yield from super()._acquire(timeout, listening)
            if acquired:
                _entered[self._key()] = self._leases[self._me()]
            return acquired
        if lease.loss is None:
            yield from self._renew(lease)
        self._raise_loss(lease)
        lease.entries += 1
        self._leases[lease.owner] = lease
        return True

    def _own(self) -> Lease:
        return self._inside() or super()._own()

    def _latest(self) -> Lease | None:
        return self._inside() or super()._latest()

    def _release(self) -> Steps[None]:
        lease = self._own()
        if lease.entries > 1:
            lease.entries -= 1
            self._raise_loss(lease)
            return
        yield from super()._release()

    def _forget(self, lease: Lease) -> None:
        if lease.foreign and lease.entries > 1:  # a forked child leaves its copies of the parent's blocks one by one
            lease.entries -= 1
            return
        super()._forget(lease)
        if _entered.get(self._key()) is lease:
            del _entered[self._key()]


os.register_at_fork(after_in_child=_entered.clear)

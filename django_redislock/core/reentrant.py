"""Re-entrance: counted in the process, so that no repeated command can count twice."""

from __future__ import annotations

from .acquirers import holders
from .base import BaseLock
from .driver.effects import Operation
from .lease import Lease


class ReentrantLease(Lease):
    """An acquisition that its owner may enter again; each object through which it did keeps it alive."""

    __slots__ = ()


class Reentrant(BaseLock):
    """Makes a lock re-entrant for the thread or task that holds it."""

    _lease_kind = ReentrantLease

    def _inside(self) -> Lease | None:
        """Return the acquisition that the caller is in, and forget one that it left through another object."""
        me = self._me()
        mine = self._leases.get(me)
        if mine is not None:
            if mine.inherited_by_fork:
                return None
            if mine.hold_count:
                return mine
            self._forget(mine)
        held = holders.leases_of(self._server, self._keys, me)
        return next((lease for lease in held if isinstance(lease, ReentrantLease)), None)

    def _acquire(self, timeout: float | None, listening: bool) -> Operation[bool]:
        lease = self._inside()
        if lease is None:
            return (yield from super()._acquire(timeout, listening))
        if lease.loss is None:
            yield from self._renew(lease)
        self._raise_loss(lease)
        lease.hold_count += 1
        self._leases[lease.acquirer] = lease
        return True

    def _own(self) -> Lease:
        return self._inside() or super()._own()

    def _latest(self) -> Lease | None:
        return self._leases.told() or self._inside() or super()._latest()

    def _release(self) -> Operation[None]:
        lease = self._own()
        if lease.hold_count > 1:
            lease.hold_count -= 1
            self._raise_loss(lease)
            return
        yield from super()._release()

    def _forget(self, lease: Lease) -> None:
        if (
            lease.inherited_by_fork and lease.hold_count > 1
        ):  # a forked child leaves its copies of the parent's blocks one by one
            lease.hold_count -= 1
            return
        super()._forget(lease)

"""Re-entrance: counted in the process, so that no repeated command can count twice."""

from __future__ import annotations

from typing import Any

from .acquirers import holders
from .base import BaseLock
from .driver.effects import Operation
from .lease import Lease
from .records import Token


class ReentrantLease(Lease):
    """An acquisition that its acquirer may enter again; each lock object that it used keeps the lease alive."""

    __slots__ = ()


class Reentrant(BaseLock):
    """Makes a lock re-entrant for the thread or task that holds it."""

    _lease_kind = ReentrantLease

    def _lease_of(self, acquirer: Any) -> Lease | None:
        """Return the acquisition that the acquirer is in, and forget one that it released through another object."""
        lease = self._leases.get(acquirer)
        if lease is not None:
            if lease.inherited_by_fork:
                return None
            if lease.hold_count:
                return lease
            self._forget(lease)
        held = holders.leases_of(self._server, self._keys, acquirer)
        return next((lease for lease in held if isinstance(lease, ReentrantLease)), None)

    def _visible_lease(self) -> Lease | None:
        return self._leases.reported() or self._lease_of(self._acquirer()) or super()._visible_lease()

    def _acquire(self, acquirer: Any, timeout: float | None, token: Token | None = None) -> Operation[bool]:
        lease = self._lease_of(acquirer)
        if lease is None:
            return (yield from super()._acquire(acquirer, timeout, token))
        if lease.loss is None:
            yield from self._renew(lease)
        self._raise_loss(lease)
        if lease in holders.leases_of(self._server, self._keys, acquirer):
            lease.hold_count += 1
        else:  # Redis did not answer its last release: it is still held, but no longer watched
            holders.add(lease)
            self._watch(lease)
        self._leases[acquirer] = lease
        return True

    def _release(self, lease: Lease) -> Operation[None]:
        if lease.hold_count > 1:
            lease.hold_count -= 1
            self._raise_loss(lease)
            return
        yield from super()._release(lease)

    def _forget(self, lease: Lease) -> None:
        if lease.inherited_by_fork and lease.hold_count > 1:  # a forked child leaves its parent's blocks one by one
            lease.hold_count -= 1
            return
        super()._forget(lease)

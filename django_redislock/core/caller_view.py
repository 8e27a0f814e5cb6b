"""What a lock object shows its caller of the caller's own acquisition, without asking Redis; of every kind of lock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NoReturn, Self

from ..exceptions import LockError, LockLost, LossRecord, NotAcquired
from . import events
from .acquirers import A, Acquirers


class CallerView(ABC, Generic[A]):
    """A lock object as its caller sees it: each thread or task has its own acquisition, and sees no other one."""

    name: str
    on_lost: Callable[[Any], object] | None
    _leases: Acquirers[A]

    @abstractmethod
    def _acquirer(self) -> Any:
        """Return the thread or task that calls."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def _copy(self, **changes: Any) -> Self:
        """Return a lock like this one, with these attributes and no acquisition; nothing is checked."""
        other, fields = object.__new__(type(self)), vars(self).copy()
        fields.update(changes, _leases=Acquirers(), _acquiring={}, _entrants=[])
        other.__dict__ = fields
        return other

    def __copy__(self) -> Self:
        return self._copy()

    def __deepcopy__(self, memo: object) -> Self:
        return self._copy()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a lock cannot be pickled, because its acquisitions belong to this process. Pass the name "
            f"({self.name!r}), and the id of the held lock if another process is to release or extend it: "
            "Lock(client, name, id=id)"
        )

    @property
    def lost(self) -> LossRecord | None:
        """Return why this acquisition was lost, or None while it is held; asks nobody and costs next to nothing."""
        lease = self._visible_lease()
        return self._leases.past_loss(self._acquirer()) if lease is None else lease.loss

    def raise_if_lost(self) -> None:
        """Raise LockLost if this acquisition was lost: call it before each irreversible step.

        Asks nobody and costs next to nothing. Raises NotAcquired when there is no acquisition.
        """
        lease = self._visible_lease()
        if lease is None:
            self._raise_if_ended()
        self._raise_loss(self._require_lease(self._acquirer()) if lease is None or lease.inherited_by_fork else lease)

    def _lease_of(self, acquirer: Any) -> A | None:
        """Return the acquisition of the thread or task; one of the process that this one was forked from is none."""
        lease = self._leases.get(acquirer)
        return None if lease is None or lease.inherited_by_fork else lease

    def _require_lease(self, acquirer: Any) -> A:
        """Return the acquisition of the thread or task. Raises NotAcquired when there is none."""
        lease = self._lease_of(acquirer)
        if lease is None:
            raise NotAcquired(self.name)
        return lease

    def _visible_lease(self) -> A | None:
        """Return the acquisition that the caller may see: its own, or the only one if the caller never had one."""
        return self._leases.reported() or self._leases.visible_to(self._acquirer())

    def _raise_if_ended(self) -> None:
        acquirer = self._acquirer()
        if self._leases.ended(acquirer):
            loss = self._leases.past_loss(acquirer)
            raise NotAcquired(self.name) if loss is None else LockLost(self.name, loss)

    def _raise_loss(self, lease: A) -> None:
        if lease.loss is not None:
            raise LockLost(self.name, lease.loss)

    def _call_on_lost(self, lease: A) -> None:
        if self.on_lost is not None:
            try:
                with self._leases.reporting(lease):
                    self.on_lost(self)
            except Exception:
                events.log.exception("The function on_lost of lock %r failed.", self.name)


def chain(name: str, error: BaseException, failure: LockError) -> None:
    """Log a release that failed after an error of its block; append it to that error's chain, for tracebacks."""
    events.log.warning("Lock %r could not be released after its block failed: %s", name, failure)
    failure.__context__ = (
        None  # it was raised while the error was handled and leads back to it: the chain would have no end
    )
    while error.__context__ is not None:
        error = error.__context__
    if error is not failure:
        error.__context__ = failure

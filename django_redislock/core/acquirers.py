"""Who acquired: through one lock object, and in the whole process.

A lock object tells its caller of the caller's own acquisition. A stale holder must not be told of its successor's, whose fence
would let its late write pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from ..exceptions import LossRecord
from .driver.fork import after_in_child
from .driver.server import Server
from .keys import LockKeys
from .lease import Lease


class Acquisition(Protocol):
    @property
    def inherited_by_fork(self) -> bool: ...
    @property
    def loss(self) -> LossRecord | None: ...


A = TypeVar("A", bound=Acquisition)

ROOM = 16
"""So many entries are kept at least before those of what is gone are looked for."""


class Acquirers(dict[Any, A]):
    """The acquisitions through one lock object, by the thread or task that acquired, and how those ended that are over."""

    _ended: dict[weakref.ref[Any], LossRecord | None] | None = None
    _room = ROOM

    def end(self, owner: Any, loss: LossRecord | None) -> None:
        """Forget the owner's acquisition, but not that there was one, nor its loss."""
        self.pop(owner, None)
        if self._ended is None:
            self._ended = {}
        ended = self._ended
        ended[weakref.ref(owner)] = loss
        if len(ended) > self._room:
            for gone in [ref for ref in list(ended) if ref() is None]:
                ended.pop(gone, None)
            self._room = 2 * len(ended) + ROOM

    def ended(self, me: Any) -> bool:
        """Whether an acquisition of the caller is over, and no other one of it is there."""
        return me is not None and me not in self and self._ended is not None and weakref.ref(me) in self._ended

    def past_loss(self, me: Any) -> LossRecord | None:
        """Return how the caller's acquisition was lost that is over."""
        return None if self._ended is None or me is None else self._ended.get(weakref.ref(me))

    def told(self) -> A | None:
        """Return the lost acquisition that the caller is being told of."""
        told = _told.get()
        return told[1] if told and told[0] is self else None

    def seen(self, me: Any) -> A | None:
        """Return the acquisition that the caller may look at: its own.

        Who never acquired may work for the one that did, if there is only one.
        """
        mine = self.get(me)
        if mine is not None or self.ended(me):
            return mine
        others = list(self.values())
        here = [each for each in others if not each.inherited_by_fork] or others
        return here[0] if len(here) == 1 else None

    @contextmanager
    def telling_of(self, acquisition: A) -> Iterator[None]:
        """Show this acquisition to whoever is called meanwhile in this thread."""
        told = [self, acquisition]
        token = _told.set(told)
        try:
            yield
        finally:
            _told.reset(token)
            told.clear()  # a task that was made meanwhile has it in its context


_told: ContextVar[list[Any] | None] = ContextVar("told", default=None)


class Holders:
    """What each thread and task of this process holds: who may enter again, and who would wait for itself."""

    def __init__(self) -> None:
        # By numbers and weak references, because a lock object that is dropped must not be renewed by this.
        self._leases: dict[tuple[object, bytes, int], tuple[weakref.ref[Lease], ...]] = {}
        self._room = ROOM

    def add(self, lease: Lease) -> None:
        """Note that the lease's owner holds it."""
        leases, key = self._leases, _key(lease.server, lease.keys, lease.acquirer)
        before = leases.get(key)
        mine = (weakref.ref(lease),)
        leases[key] = mine if before is None else (*_living(before), *mine)  # lost, perhaps, and not left yet
        if len(leases) > self._room:
            for other, refs in list(leases.items()):
                if not _living(refs) and leases.get(other) is refs:
                    leases.pop(other, None)
            self._room = 2 * len(leases) + ROOM

    def remove(self, lease: Lease) -> None:
        """Note that the lease's owner does not hold it any more."""
        key = _key(lease.server, lease.keys, lease.acquirer)
        refs = self._leases.pop(key, ())
        if refs and (len(refs) > 1 or refs[0]() is not lease):
            left = tuple(ref for ref in refs if ref() not in (None, lease))
            if left:
                self._leases[key] = left

    def leases_of(self, server: Server, keys: LockKeys, owner: Any) -> list[Lease]:
        """Return what the thread or task holds of this lock, through whichever object and client; the last one first."""
        refs = self._leases.get(_key(server, keys, owner))
        if refs is None:
            return []
        return [lease for ref in reversed(refs) if (lease := ref()) is not None and lease.acquirer is owner]

    def clear(self) -> None:
        """Forget all: a forked child holds nothing of its parent's."""
        self._leases = {}


def _key(server: Server, keys: LockKeys, owner: Any) -> tuple[object, bytes, int]:
    return server.place, keys.lock, id(owner)


def _living(refs: tuple[weakref.ref[Lease], ...]) -> tuple[weakref.ref[Lease], ...]:
    return tuple(ref for ref in refs if ref() is not None)


holders = Holders()
after_in_child("acquirers", holders.clear)

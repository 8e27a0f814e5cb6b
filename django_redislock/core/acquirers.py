"""Tables of acquisitions, by the thread or task that acquired: one table for each lock object, one for the process; and
the view of its own acquisition that a lock object gives its caller without asking Redis.

A lock object shows its caller the caller's own acquisition. A stale holder must not see its successor's acquisition,
because with that fence its late write would pass.
"""

from __future__ import annotations

import dis
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, Self, TypeVar

from ..exceptions import AcquireTimeout, LockError, LockLost, LossRecord, NotAcquired
from . import events
from .driver.effects import Operation, Sleep
from .driver.process import after_in_child
from .driver.server import Server
from .keys import LockKeys
from .lease import Lease


class Acquisition(Protocol):
    """The state of an acquisition that a lock object needs: a `Lease`, or a `QuorumLease`."""

    @property
    def inherited_by_fork(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    @property
    def loss(self) -> LossRecord | None: ...


A = TypeVar("A", bound=Acquisition)

MIN_ENTRIES = 16
"""A table with fewer entries is not searched for entries of acquirers that are gone."""


class Acquirers(dict[Any, A]):
    """The acquisitions through one lock object, by acquirer, and the losses of the ended ones."""

    _ended: dict[weakref.ref[Any], LossRecord | None] | None = None
    _limit = MIN_ENTRIES

    def end(self, acquirer: Any, loss: LossRecord | None) -> None:
        """Forget the acquirer's acquisition, but remember that there was one, and its loss."""
        self.pop(acquirer, None)
        if self._ended is None:
            self._ended = {}
        ended = self._ended
        ended[weakref.ref(acquirer)] = loss
        if len(ended) > self._limit:
            for gone in [ref for ref in list(ended) if ref() is None]:
                ended.pop(gone, None)
            self._limit = 2 * len(ended) + MIN_ENTRIES

    def ended(self, acquirer: Any) -> bool:
        """Return whether an acquisition of the acquirer has ended, and it has no other one."""
        return (
            acquirer is not None
            and acquirer not in self
            and self._ended is not None
            and weakref.ref(acquirer) in self._ended
        )

    def past_loss(self, acquirer: Any) -> LossRecord | None:
        """Return the loss by which the acquirer's last acquisition ended."""
        return None if self._ended is None or acquirer is None else self._ended.get(weakref.ref(acquirer))

    def reported(self) -> A | None:
        """Return the lost acquisition whose loss is being reported to the caller."""
        reported = _reported.get()
        return reported[1] if reported and reported[0] is self else None

    def visible_to(self, acquirer: Any) -> A | None:
        """Return the acquisition that the acquirer may see: its own.

        A thread or task that never acquired may work for the acquirer, if there is only one.
        """
        own = self.get(acquirer)
        if own is not None or self.ended(acquirer):
            return own
        others = list(self.values())
        others = [lease for lease in others if not lease.inherited_by_fork] or others
        return others[0] if len(others) == 1 else None

    @contextmanager
    def reporting(self, acquisition: A) -> Iterator[None]:
        """Show this acquisition to the functions that this thread calls meanwhile."""
        reported = [self, acquisition]
        token = _reported.set(reported)
        try:
            yield
        finally:
            _reported.reset(token)
            reported.clear()  # a task that was created meanwhile keeps it in its context


_reported: ContextVar[list[Any] | None] = ContextVar("reported", default=None)


class Block(NamedTuple):
    """A ``with`` block that was entered."""

    acquirer: Any
    frame: FrameType
    """The frame that entered it: that of the ``with`` statement, or of a helper, such as an `ExitStack`."""
    held: Any = None


def leave(blocks: list[Block], acquirer: Any, frame: FrameType, holds: bool = False) -> Block | None:
    """Remove the block that this frame leaves, and return it; None when the acquirer has to leave what it has."""
    block = left_by(blocks, acquirer, frame, holds)
    if block is not None:
        blocks.remove(block)
    return block


def left_by(blocks: list[Block], acquirer: Any, frame: FrameType, holds: bool = False) -> Block | None:
    """Return the block that this frame leaves; None when the acquirer has to leave what it has.

    Another thread or task may leave a block: the ends of FastAPI's dependencies run in any thread of a pool, and a
    thread that was inside a block of its own released that one. The frame tells them apart, because a ``with``
    statement enters and leaves in one frame, also in a generator. A helper's frame is over when the block is left: of
    such blocks it is the caller's own one, or else the only one. `holds`: the acquirer may have acquired without a
    block.
    """
    for own in blocks[::-1]:
        if own.frame is frame and own.acquirer is acquirer:
            return own
    found = blocks.copy()
    mine = [block for block in found if block.acquirer is acquirer]
    left = [block for block in found if block.frame is frame]
    if not left:
        over = [block for block in found if _is_over(block.frame)]
        left = [block for block in over if block.acquirer is acquirer]
        if not left and (mine or not holds) and len({id(block.acquirer) for block in over}) == 1:
            left = over
        left = left or mine  # entered by a call in a frame that goes on
    return left[-1] if left else None  # it is not known which one is left


def forget(blocks: list[Block], block: Block) -> None:
    """Remove a block that was perhaps not entered, or is left already."""
    if any(each is block for each in blocks.copy()):  # an equal one may be that of an outer entry
        blocks.remove(block)


def _is_over(frame: FrameType) -> bool:
    """Whether the frame has returned. One that waits in a call, or at a ``yield``, has not."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")


class CallerView(ABC, Generic[A]):
    """A lock object as its caller sees it: each thread or task has its own acquisition, and sees no other one."""

    name: str
    on_lost: Callable[[Any], object] | None
    _leases: Acquirers[A]
    _blocks: list[Block]
    """The blocks that were entered and not left."""

    @abstractmethod
    def _acquirer(self) -> Any:
        """Return the thread or task that calls."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def _copy(self, **changes: Any) -> Self:
        """Return a lock like this one, with these attributes and no acquisition; nothing is checked."""
        other, fields = object.__new__(type(self)), vars(self).copy()
        fields.update(changes, _leases=Acquirers(), _acquiring={}, _blocks=[])
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
        """Return why this acquisition was lost, or None while it is held. Sends no command and costs almost nothing."""
        lease = self._visible_lease()
        return self._leases.past_loss(self._acquirer()) if lease is None else lease.loss

    def raise_if_lost(self) -> None:
        """Raise LockLost if this acquisition was lost: call it before each irreversible step.

        Sends no command and costs almost nothing. Raises NotAcquired when there is no acquisition through this object;
        whether a given id still holds the lock, `extend` asks Redis.
        """
        lease = self._visible_lease()
        if lease is None:
            self._raise_if_ended(self._acquirer())
        if lease is None or lease.inherited_by_fork:
            raise NotAcquired(self.name)
        self._raise_unless_held(lease)

    def _lease_of(self, acquirer: Any) -> A | None:
        """Return the acquisition of the thread or task, but none that this process inherited by a fork."""
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

    def _left_by(self, acquirer: Any, frame: FrameType) -> Any:
        """Return the thread or task that entered the block which this frame leaves in the thread or task that calls."""
        block = leave(self._blocks, acquirer, frame, acquirer in self._leases)
        return acquirer if block is None else block.acquirer

    def _raise_if_ended(self, acquirer: Any) -> None:
        if self._leases.ended(acquirer):
            loss = self._leases.past_loss(acquirer)
            raise NotAcquired(self.name) if loss is None else LockLost(self.name, loss)

    def _raise_loss(self, lease: A) -> None:
        if lease.loss is not None:
            raise LockLost(self.name, lease.loss)

    def _raise_unless_held(self, lease: A) -> None:
        """Raise LockLost when the acquisition was lost, and NotAcquired when its release was begun."""
        self._raise_loss(lease)
        if lease.ended:
            raise NotAcquired(self.name)

    def _call_on_lost(self, lease: A) -> None:
        if self.on_lost is not None:
            try:
                with self._leases.reporting(lease):
                    self.on_lost(self)
            except Exception:
                events.log.exception("The function on_lost of lock %r failed.", self.name)


E = TypeVar("E")


class IfFree(Generic[E]):
    """A block that enters a lock, or several, and gets None in place of AcquireTimeout. An AcquireTimeout of the body
    passes: ``except AcquireTimeout`` around a ``with lock`` takes that for the lock's."""

    def __init__(self, lock: E) -> None:
        self._lock: Any = lock
        self._missed = False

    def __enter__(self) -> E | None:
        self._missed = False
        try:
            return self._lock.__enter__()  # type: ignore[no-any-return]
        except AcquireTimeout:
            self._missed = True
            return None

    def __exit__(self, *raised: Any) -> None:
        if not self._missed:
            self._lock.__exit__(*raised)


class AsyncIfFree(Generic[E]):
    """The same for ``async with``."""

    def __init__(self, lock: E) -> None:
        self._lock: Any = lock
        self._missed = False

    async def __aenter__(self) -> E | None:
        self._missed = False
        try:
            return await self._lock.__aenter__()  # type: ignore[no-any-return]
        except AcquireTimeout:
            self._missed = True
            return None

    async def __aexit__(self, *raised: Any) -> None:
        if not self._missed:
            await self._lock.__aexit__(*raised)


def chain(name: str, error: BaseException, failure: LockError) -> None:
    """Log a release that failed after an error of its block; append it to that error's chain, for tracebacks."""
    events.log.warning("Lock %r could not be released after its block failed: %s", name, failure)
    # It was raised while the error was handled and leads back to it: the chain would have no end.
    failure.__context__ = None
    while error.__context__ is not None:
        error = error.__context__
    if error is not failure:
        error.__context__ = failure


works_for: ContextVar[Callable[[], Any]] = ContextVar("works_for", default=lambda: None)
"""The task that acquired last; threads of ``sync_to_async`` and ``asyncio.to_thread`` get its context."""


class Holders:
    """The acquisitions of all threads and tasks of this process: for re-entrance, and so that none waits for itself."""

    def __init__(self) -> None:
        # By numbers and weak references, because this table must not keep the lease of a dropped lock object alive and
        # renewed.
        self._leases: dict[tuple[object, bytes, int], tuple[weakref.ref[Lease], ...]] = {}
        self._limit = MIN_ENTRIES

    def __bool__(self) -> bool:
        """Whether anybody in this process may hold a lock."""
        return bool(self._leases)

    def add(self, lease: Lease) -> None:
        """Note that the lease's acquirer holds it."""
        leases, key = self._leases, _key(lease.server, lease.keys, lease.acquirer)
        before = leases.get(key)
        added = (weakref.ref(lease),)
        leases[key] = added if before is None else (*_living(before), *added)  # perhaps lost, and not released yet
        if len(leases) > self._limit:
            for other, refs in leases.copy().items():
                if not _living(refs) and leases.get(other) is refs:
                    leases.pop(other, None)
            self._limit = 2 * len(leases) + MIN_ENTRIES

    def remove(self, lease: Lease) -> None:
        """Note that the lease's acquirer no longer holds it."""
        key = _key(lease.server, lease.keys, lease.acquirer)
        refs = self._leases.pop(key, ())
        if refs and (len(refs) > 1 or refs[0]() is not lease):
            left = tuple(ref for ref in refs if ref() not in (None, lease))
            if left:
                self._leases[key] = left

    def leases_of(self, server: Server, keys: LockKeys, acquirer: Any) -> list[Lease]:
        """Return the acquirer's acquisitions of this lock, through any object and client; the last one first."""
        refs = self._leases.get(_key(server, keys, acquirer))
        if refs is None:
            return []
        return [lease for ref in reversed(refs) if (lease := ref()) is not None and lease.acquirer is acquirer]

    def clear(self) -> None:
        """Forget all acquisitions: a forked child holds none of its parent's."""
        self._leases = {}


def _key(server: Server, keys: LockKeys, acquirer: Any) -> tuple[object, bytes, int]:
    return server.place, keys.lock, id(acquirer)


def _living(refs: tuple[weakref.ref[Lease], ...]) -> tuple[weakref.ref[Lease], ...]:
    return tuple(ref for ref in refs if ref() is not None)


holders = Holders()
after_in_child("acquirers", holders.clear)


def waits_for_itself(server: Server, keys: LockKeys, acquirer: Any) -> Operation[list[Lease]]:
    """Return the acquisitions of this lock whose holders can do nothing while the acquirer waits.

    The holder is the acquirer itself, or its caller through asgiref: a thread waits for the first task of its
    ``async_to_sync``, and a task for the thread of its ``sync_to_async``. To find these we look into asgiref; where
    another version has nothing there, the acquirer waits as for any holder.
    """
    held = holders.leases_of(server, keys, acquirer)
    asgiref = sys.modules.get("asgiref.sync")
    if asgiref is None:
        return held
    begun = acquirer.get_coro() if hasattr(acquirer, "get_coro") else None
    if getattr(begun, "__qualname__", "").startswith("AsyncToSync."):
        thread = getattr(getattr(asgiref.AsyncToSync.executors, "current", None), "_work_thread", None)
        held += holders.leases_of(server, keys, thread)
    task = works_for.get()()
    found = holders.leases_of(server, keys, task) if task is not None and task is not acquirer else []
    if found and hasattr(task, "get_coro"):
        for _ in range(MAX_LOOKS):  # the thread may be here before the task that started it has begun to wait
            if not getattr(task.get_coro(), "cr_running", False):
                break
            yield Sleep(0.001)
        if _waits_in_a_bridge(task, acquirer, asgiref.SyncToAsync):
            held += found
    return held


MAX_LOOKS = 50
"""How often we look, a millisecond apart, whether a task has begun to wait."""


def _waits_in_a_bridge(task: Any, acquirer: Any, bridge: Any) -> bool:
    """Return whether the task waits for the calling thread, or for the thread that waits for the acquiring task."""
    own = getattr(bridge.threadlocal, "task_context", None)
    coroutine = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None and frame.f_code is bridge.__call__.__code__:
            tasks = frame.f_locals.get("task_context")  # one list for each call: the tasks that its thread waits for
            return tasks is not None and (tasks is own or acquirer in tasks)
        coroutine = getattr(coroutine, "cr_await", None)
    return False

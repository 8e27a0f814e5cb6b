"""The lock for threads and for asyncio alike: its arguments, its acquisitions, and the operations on them."""

from __future__ import annotations

import inspect
import logging
import math
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, Self, Unpack

from ..exceptions import AlreadyAcquired, LockBackendError, LockError, NotAcquired
from . import events, operations
from .acquirers import Acquirers, CallerView, chain, holders, waits_for_itself
from .attempt import Attempt
from .clock import monotonic
from .driver import process
from .driver.effects import Operation, is_temporary
from .driver.registry import replicated, server_of
from .keys import LockKeys, lock_keys, new_id, record
from .lease import Lease, check_reason, find_cause
from .operations import AcquireRequest
from .options import CoreOptions, Renewal, checked_options
from .records import LockInfo, marked, new_mark, parse
from .validation import Seconds, Wait, check_expire, check_name, wait_of
from .watchdog import acquirer_ended, watchdog

MESSAGES = {"acquired": "Lock %r acquired (fence %d).", "released": "Lock %r released (fence %d)."}


class Transactions(Protocol):
    """What a lock does about transactions of a database, of which this layer knows nothing."""

    def watch(self, lease: Lease) -> None:
        """Note that the lock was acquired, or entered again."""

    def postpones(self, lock: Any, acquirer: Any) -> bool:
        """Return whether the release for the acquirer happens later. Raises NotAcquired."""


class BaseLock(CallerView[Lease]):
    """A lock of a name in Redis: at most one holder at a time.

    `expire` is its expiry in seconds without renewal. With `auto_renewal` a watchdog renews it while its holder is
    alive, for at most `max_hold` seconds: every third of the expiry, or earlier by up to the share `renewal_jitter`
    (0.1), drawn at random. ``with`` and ``acquire()`` wait as `blocking` and `timeout` (seconds; None:
    without limit) say. `id` is the owner id to use: give the id of a held lock to release or extend it from elsewhere.
    `label` is shown as part of the holder. `on_lost(lock)` is called after a loss, perhaps in another thread.

    `min_replicas` replicas must confirm within half a second that they have the lock, also at each renewal. With fewer,
    `acquire` gives the lock back and raises LockBackendError, and a renewal is tried again until the deadline.

    With `reentrant`, the thread or task that holds the lock may acquire it again, through any re-entrant object of the
    same name and database. Each further entry renews the lock and proves that it is still held: a lost one raises
    LockLost. The last exit releases.

    Threads or tasks may share one object: each has its own acquisition and sees no other one. A caller that never
    acquired through the object, such as a thread that works for the holder, sees the only acquisition there is. Inside
    `on_lost` a caller sees the lost one. A copy of a lock is a new object that has acquired nothing.
    Raises TypeError and ValueError for bad arguments.
    """

    _transactions: Transactions | None = None
    """What its release has to do with the transactions of a database; None: nothing."""
    _without: tuple[str, ...] = ()
    """The options of a lock that this kind does not have."""

    def __init__(
        self,
        client: Any,
        name: str,
        *,
        blocking: bool = True,
        timeout: Seconds | None = None,
        **options: Unpack[CoreOptions],
    ) -> None:
        checked = checked_options(type(self).__name__, options, self._without)
        self._server = server_of(client)
        if checked.min_replicas:
            self._server = replicated(self._server, checked.min_replicas)
        self.name = check_name(name)
        self._prefix = checked.prefix
        self._keys = self._keys_of(name)
        self.renewal: Renewal = checked
        self._given_id = checked.id
        self._wait = wait_of(blocking, timeout)
        self.label = checked.label
        self.on_lost = checked.on_lost
        self.kind = checked.kind
        self._reentrant = checked.reentrant
        self._leases: Acquirers[Lease] = Acquirers()
        self._acquiring: dict[Any, weakref.ref[Operation[bool]]] = {}  # the last one begun, by process and acquirer
        self._blocks = []

    @property
    def expire(self) -> float:
        """Return the seconds until the lock's expiry without a renewal."""
        return self.renewal.expire

    def _like(self, name: str, wait: Wait | None = None) -> Self:
        """Return a lock of another name, which waits as given, or as this one."""
        check_name(name)
        return self._copy(name=name, _keys=self._keys_of(name), _wait=wait or self._wait)

    def _keys_of(self, name: str) -> LockKeys:
        return lock_keys(self._prefix, name)

    @property
    def id(self) -> str | None:
        """Return the owner id of this acquisition: the right to extend and release it; None before the first one.

        Raises NotAcquired or LockLost when the acquisition has ended.
        """
        if self._given_id is not None:
            return self._given_id
        lease = self._visible_lease()
        if lease is None:
            self._raise_if_ended(self._acquirer())
        return None if lease is None else lease.id

    @property
    def fence(self) -> int:
        """Return the fencing number of this acquisition: larger than every earlier one of the same name.

        Raises NotAcquired, also after the release, and LockLost when `release` has raised it.
        """
        lease = self._visible_lease()
        if lease is None:
            self._raise_if_ended(self._acquirer())
            raise NotAcquired(self.name)
        return lease.fence

    if not TYPE_CHECKING:  # a type checker reports it better

        @property
        def local(self) -> NoReturn:
            # It was the object's id for ever: two workers that released by one token both acquired afterwards.
            raise AttributeError(
                f"{type(self).__name__} has no `local`: read `id` in place of `local.token`, and give a new lock "
                "object the id of the held lock (`id=held.id`) to release or to extend it from elsewhere"
            )

    # The operations, which drivers run. Each is given the acquirer or its acquisition.

    def _acquire(self, acquirer: Any, timeout: float | None) -> Operation[bool]:
        lease = self._lease_of(acquirer) if self._leases or self._reentrant else None
        if lease is not None and lease.ended:
            return self._acquire_after_release(lease, acquirer, timeout)
        if lease is None or not self._reentrant:
            return self._acquire_anew(acquirer, timeout)
        return self._enter_again(lease, acquirer, timeout)

    def _enter_again(self, lease: Lease, acquirer: Any, timeout: float | None) -> Operation[bool]:
        """Prove that the lock is still held, by a renewal; then count the entry.

        It is counted in the process, so that no repeated command can count twice.
        """
        self._raise_loss(lease)
        yield from self._renew(lease, math.inf if timeout is None else monotonic() + timeout)
        self._raise_loss(lease)
        self._leases[acquirer] = lease
        if self._transactions is not None:
            self._transactions.watch(lease)
        lease.hold_count += 1  # the last line: an entry that was interrupted is never left
        return True

    def _acquire_after_release(self, lease: Lease, acquirer: Any, timeout: float | None) -> Operation[bool]:
        """Repeat the release that Redis did not answer, and acquire the lock anew, under another id.

        The lock was entered again, because it was still held; then the first release arrived late, and another caller
        got the lock, too (seed 43119309 of the simulation).
        """
        until = math.inf if timeout is None else monotonic() + timeout
        try:
            yield from operations.release(lease, until)
        except LockBackendError as error:
            # A server that is away may be back in time: until the expiry, what is left there blocks the next
            # acquisition like the lock of somebody else (seed 44200190). With a given id the next acquisition would be
            # that same one, so the first release, arriving late, would end it.
            if lease.mark or not is_temporary(error.__cause__):
                raise
        self._forget(lease)
        left = None if timeout is None else max(0.0, until - monotonic())
        return (yield from self._acquire_anew(acquirer, left))

    def _acquire_anew(self, acquirer: Any, timeout: float | None) -> Operation[bool]:
        # With an id of the caller's choice Redis cannot distinguish this object's threads or tasks: one would wait for
        # itself. In a forked child, acquisitions that the parent's threads began never end.
        key = process.pid, acquirer if self._given_id is None else None
        steps = self._acquire_alone(key, acquirer, timeout)
        turn = weakref.ref(steps)
        other = self._acquiring.setdefault(key, turn)
        if other is not turn:
            # A generator knows by itself whether it has ended. A note that the acquisition would have to take back
            # stayed after a signal in its last lines: this thread got AlreadyAcquired for ever.
            before = other()
            if before is not None and inspect.getgeneratorstate(before) != inspect.GEN_CLOSED:
                raise AlreadyAcquired(self.name)
            self._acquiring[key] = turn
        return steps

    def _acquire_alone(self, key: tuple[int, Any], acquirer: Any, timeout: float | None) -> Operation[bool]:
        attempt = None
        try:
            if self._leases:
                self._raise_if_held(acquirer)
            request = self._new_request(acquirer, timeout)
            attempt, lease = request.attempt, request.lease
            held: list[Lease] = []
            if timeout != 0 and holders and self._is_kept_waiting(acquirer):
                held = yield from self._waits_for_itself(acquirer)
            acquire = operations.acquire_again(request, held) if held else operations.acquire(request)
            acquired = (yield from acquire) and self._accepts(request)
            if acquired:
                self._leases[acquirer] = lease
                holders.add(lease)
                self._watch(lease)
                self._report("acquired", lease)
            else:
                attempt.pending = attempt.repeated
                attempt.give_up()
            self._acquiring.pop(key, None)
            attempt.pending = False  # the last line: whatever comes before it gives everything back
            return acquired
        except BaseException:
            if attempt is not None:
                attempt.pending = attempt.pending or attempt.lease.fence != 0
                attempt.give_up()
                self._stop(attempt.lease)
                self._forget(attempt.lease)
            self._acquiring.pop(key, None)
            raise

    def _raise_if_held(self, acquirer: Any) -> None:
        """Raise AlreadyAcquired if this object holds the lock by the id that the acquirer would use.

        Forget acquisitions that no caller needs: released through another object, or lost by a thread or task that
        ended, or over after its release that Redis did not answer.
        """
        for other, lease in self._leases.copy().items():
            if lease.inherited_by_fork:
                continue
            over = lease.loss is not None or (lease.ended and monotonic() >= lease.deadline)
            if not lease.hold_count or (over and acquirer_ended(lease)):
                self._forget(lease)
            elif not over and (other is acquirer or self._given_id is not None):
                raise AlreadyAcquired(self.name)

    def _new_request(self, acquirer: Any, timeout: float | None) -> AcquireRequest:
        given = self._given_id is not None
        mark = new_mark() if given else b""
        attempt = Attempt(self._new_lease(acquirer, self._given_id or new_id()), mark)
        return AcquireRequest(attempt, marked(self._record(), mark), timeout, given, self._is_subscribed())

    def _waits_for_itself(self, acquirer: Any) -> Operation[list[Lease]]:
        """Return the acquisitions without whose end the acquirer waits for ever, and that only it can end."""
        return waits_for_itself(self._server, self._keys, acquirer)

    def _is_subscribed(self) -> bool:
        """Return whether wake-ups arrive already."""
        return self._server.room.open

    def _is_kept_waiting(self, acquirer: Any) -> bool:
        """Return whether the acquirer can do nothing else while it waits."""
        return True

    def _accepts(self, request: AcquireRequest) -> bool:
        """Return whether the server's grant is the acquisition that was asked for."""
        return True

    def _watch(self, lease: Lease) -> None:
        if not self._server.grants_all:
            watchdog.add(lease, self.renewal.auto_renewal)
        if self._transactions is not None:
            self._transactions.watch(lease)

    def _record(self) -> bytes:
        """Return the record of the holder, for `owner()` and lists."""
        return record(self.kind, self.label, self.expire, self.renewal.auto_renewal)

    def _release(self, lease: Lease) -> Operation[None]:
        return self._leave_inner(lease) if lease.hold_count > 1 else self._release_last(lease)

    def _leave_inner(self, lease: Lease) -> Operation[None]:
        """Leave a block within another one of the same acquisition."""
        yield from ()
        try:
            self._raise_loss(lease)
        finally:
            lease.hold_count -= 1  # the last line, so that an interrupted exit has not counted itself

    def _release_last(self, lease: Lease) -> Operation[None]:
        self._stop(lease)
        if lease.loss is None:
            lease.ended = True
            released = yield from operations.release(lease)
            if not released:
                lease.lose((yield from find_cause(lease)))
        else:
            yield from operations.release_lost(lease)
        self._forget(lease)
        if lease.noted_loss is not None:
            self._raise_loss(lease)
        self._report("released", lease)

    def _exit(self, acquirer: Any, error: BaseException | None) -> Operation[None]:
        lease = self._leases.get(acquirer)
        if lease is not None and lease.inherited_by_fork:  # a forked child leaves its copy of the parent's block
            self._forget(lease)
            return
        try:
            yield from self._release(self._lease_to_leave(acquirer))
        except LockError as failure:
            if error is None:
                raise
            chain(self.name, error, failure)

    def _lease_to_leave(self, acquirer: Any) -> Lease:
        """Return the acquisition of a block that the acquirer entered. Raises NotAcquired when there is none."""
        return self._require_lease(acquirer)

    def _holding(self, acquirer: Any) -> tuple[Lease | None, int]:
        """Return what the acquirer has now, and how often it entered it, for `_take_back`."""
        lease = self._lease_of(acquirer) if self._leases or self._reentrant else None
        return lease, 0 if lease is None else lease.hold_count

    def _take_back(self, acquirer: Any, had: tuple[Lease | None, int]) -> None:
        """Give back what the acquirer has got since it had this, because its call raised.

        A signal handler may raise in the driver's last lines, or in the caller's, after the acquisition has ended well:
        4 of 759 soft time limits left a lock that was renewed, and each further ``with`` raised AlreadyAcquired.
        """
        if self._has_gained(acquirer, had):
            self._exit_interrupted(acquirer)

    def _has_gained(self, acquirer: Any, had: tuple[Lease | None, int]) -> bool:
        lease = self._leases.get(acquirer)
        if lease is None or lease.inherited_by_fork:  # its parent's block, which a forked child leaves later
            return False
        return lease is not had[0] or lease.hold_count > had[1]

    def _exit_interrupted(self, acquirer: Any) -> None:
        """Leave a block whose end was interrupted; the lock is released without waiting for it."""
        lease = self._leases.get(acquirer)
        if lease is not None and not lease.inherited_by_fork and lease.hold_count > 1:
            lease.hold_count -= 1
        elif lease is not None:
            if lease.loss is None:
                lease.ended = True
                operations.send_release(lease)
            self._stop(lease)
            self._forget(lease)

    def _extend(self, acquirer: Any, expire: Seconds | None) -> Operation[Literal[True]]:
        seconds = None if expire is None else check_expire(expire)
        lease = self._require_lease(acquirer)
        self._raise_unless_held(lease)
        if seconds is not None:
            lease.change(seconds)
            watchdog.reschedule(lease)
        yield from self._renew(lease)
        self._raise_loss(lease)
        return True

    def _renew(self, lease: Lease, until: float = math.inf) -> Operation[None]:
        if not (yield from operations.renew(lease, until)):
            watchdog.remove(lease)
            lease.lose((yield from find_cause(lease)))

    def _owner(self) -> Operation[LockInfo | None]:
        if self._server.grants_all:
            return self._granted_info(self._visible_lease())
        (stored,) = yield from operations.read(self._server, self.name, [self._keys])
        return None if stored is None else stored.info

    def _owned(self, acquirer: Any) -> Operation[bool]:
        holder = yield from self._owner()
        return holder is not None and holder.id == self._owner_id(acquirer)

    def _granted_info(self, lease: Lease | None) -> LockInfo | None:
        """Return what a server would tell of the caller's acquisition, because this server remembers none."""
        if lease is None or not lease.fence:
            return None
        value = b"%s\n%d\n%d\n%s" % (lease.id.encode(), lease.fence, lease.fence // 1000, self._record())
        stored = parse(self.name, value, round(lease.expire * 1000), 0, int(time.time() * 1000))
        return None if stored is None else stored.info

    def _reset(self, fence: int | None, by: object, reason: str, recalls: bool = False) -> Operation[bool]:
        check_reason(reason)
        what = f"Lock {self.name!r} (fence {'any' if fence is None else fence})"
        return operations.reset(what, self._server, self.name, self._keys, fence, by, reason, recalls)

    def _new_lease(self, acquirer: Any, id: str) -> Lease:
        lease = Lease(self._server, self.name, self._keys, id, self.renewal, acquirer, weakref.ref(self))
        lease.reentrant = self._reentrant
        return lease

    def _lease_of(self, acquirer: Any) -> Lease | None:
        """Return the acquisition of the thread or task, but none that this process inherited by a fork.

        If the lock is re-entrant, it may be one through another object; one that was released there is forgotten.
        """
        lease = self._leases.get(acquirer)
        if lease is not None and lease.inherited_by_fork:
            lease = None
        if not self._reentrant:
            return lease
        if lease is not None:
            if lease.hold_count:
                return lease
            self._forget(lease)
        held = holders.leases_of(self._server, self._keys, acquirer)
        return next((lease for lease in held if lease.reentrant), None)

    def _visible_lease(self) -> Lease | None:
        if not self._reentrant:
            return super()._visible_lease()
        return self._leases.reported() or self._lease_of(self._acquirer()) or super()._visible_lease()

    def _owner_id(self, acquirer: Any) -> str | None:
        """Return the id of the acquirer's acquisition, or the given id."""
        lease = self._lease_of(acquirer)
        return self._given_id if lease is None else lease.id

    def _require_lease(self, acquirer: Any) -> Lease:
        """Return the acquirer's acquisition, or the acquisition of the given id, whichever object acquired it."""
        lease = self._lease_of(acquirer)
        if lease is None:
            if self._given_id is None or acquirer in self._leases:
                raise NotAcquired(self.name)
            lease = self._new_lease(acquirer, self._given_id)
            lease.note_acquired(0, monotonic())
        return lease

    def _stop(self, lease: Lease) -> None:
        """Let the lease end: the watchdog renews it no more, and its acquirer may wait for its expiry."""
        watchdog.remove(lease)
        holders.remove(lease)

    def _forget(self, lease: Lease) -> None:
        if lease.inherited_by_fork and lease.hold_count > 1:  # a forked child leaves its parent's blocks one by one
            lease.hold_count -= 1
            return
        lease.hold_count = 0
        if self._leases.get(lease.acquirer) is lease:
            self._leases.end(lease.acquirer, lease.noted_loss)

    def _raise_loss(self, lease: Lease) -> None:
        if lease.loss is not None and lease.fence == 0:  # the id was given, and this object acquired nothing
            raise NotAcquired(self.name)
        super()._raise_loss(lease)

    def _report(self, event: str, lease: Lease) -> None:
        if events.listeners or events.log.isEnabledFor(logging.DEBUG):  # each cycle has two of these events
            events.emit(event, MESSAGES[event], self.name, lease.fence, name=self.name, fence=lease.fence)

"""What a lock is for threads and for asyncio alike: its arguments, its acquisitions, and the steps of each operation."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NoReturn, Self, Unpack

from ..exceptions import AlreadyAcquired, LockError, LockLost, LossRecord, NotAcquired
from . import events, operations, records
from .acquirers import Acquirers, holders
from .clock import monotonic
from .driver import process
from .driver.effects import Operation
from .driver.registry import server_of
from .keys import lock_keys
from .lease import Lease
from .loss import check_reason, find_cause, report_reset
from .records import LockInfo
from .token import Local, Token
from .validation import (
    Nothing,
    Seconds,
    Wait,
    check_expire,
    check_id,
    check_name,
    check_prefix,
    unexpected,
    wait_of,
)
from .watchdog import acquirer_ended, watchdog

DEFAULT_EXPIRE = 30.0
TOLD = {"acquired": "Lock %r acquired (fence %d).", "released": "Lock %r released (fence %d)."}
SELF_WAIT = (
    "Lock %r (fence %d) is held by the very thread or task that waits for it now, through another object: only the end of its "
    "life, or somebody else who frees it, can end this wait before the timeout. Release it first, or make both re-entrant: "
    "lock(name, reentrant=True), rlock(name) or core.RLock."
)


class BaseLock(ABC):
    """A lock of a name in Redis: at most one holder at a time.

    `expire` is its life in seconds without renewal; with `auto_renewal` a watchdog renews it while its holder lives, at
    most for `max_hold` seconds. `blocking` and `timeout` are what ``with`` and ``acquire()`` wait by. `id` is the owner id to use: give
    that of a held lock to release or extend it from elsewhere. `label` is told to those who ask who holds the lock.
    `on_lost(lock)` is called, from another thread perhaps, when the lock is lost while it is believed to be held.

    One object may be shared by threads or tasks: each has its own acquisition, and is told of no other. Who never acquired
    through the object, such as a thread that works for the holder, may look at the only acquisition there is, and inside
    `on_lost` it is the lost one. A copy of a lock is a new object that has acquired nothing.

    Raises TypeError and ValueError for bad arguments.
    """

    _lease_kind = Lease
    _tokens: dict[Any, Token] = {}  # never changed in place
    """The tokens of threads or tasks that acquire by a token now, and not by a new id."""

    def __init__(
        self,
        client: Any,
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
        **wrong: Unpack[Nothing],
    ) -> None:
        if wrong:
            raise unexpected(type(self).__name__, wrong, BaseLock.__init__.__kwdefaults__ or ())
        self._server = server_of(client)
        self.name = check_name(name)
        self._prefix = check_prefix(prefix)
        self._keys = lock_keys(prefix, name)
        self.expire = DEFAULT_EXPIRE if expire is None else check_expire(expire)
        if not isinstance(auto_renewal, bool):
            raise TypeError(f"auto_renewal must be True or False, not {auto_renewal!r}")
        self.auto_renewal = auto_renewal
        self.max_hold = None if max_hold is None else check_expire(max_hold, "max_hold")
        self._given_id = None if id is None else check_id(id)
        self._wait = wait_of(blocking, timeout)
        if label is not None and not isinstance(label, str):
            raise TypeError(f"label must be a str, not {type(label).__name__}")
        self.label = label or ""
        if on_lost is not None and (not callable(on_lost) or inspect.iscoroutinefunction(on_lost)):
            raise TypeError("on_lost must be a plain function")
        self.on_lost = on_lost
        self.kind = kind
        self._leases: Acquirers[Lease] = Acquirers()
        self._coming: dict[Any, object] = {}  # who acquires now
        # Of an AsyncLock: the tasks that entered an ``async with`` block, each as often as it did.
        self._entrants: list[Any] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def _copy(self, **changes: Any) -> Self:
        """Return a lock with the options of this one, but for these attributes, and with no acquisition; nothing is checked."""
        other, fields = object.__new__(type(self)), vars(self).copy()
        fields.update(changes, _leases=Acquirers(), _coming={}, _entrants=[])
        other.__dict__ = fields
        return other

    def _like(self, name: str, wait: Wait | None = None) -> Self:
        """Return a lock of another name, which waits as given, or as this one."""
        check_name(name)
        return self._copy(name=name, _keys=lock_keys(self._prefix, name), _wait=wait or self._wait)

    def __copy__(self) -> Self:
        return self._copy()

    def __deepcopy__(self, memo: object) -> Self:
        return self._copy()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a lock cannot be pickled, because its acquisitions belong to this process. Pass the name ({self.name!r}), and "
            "the id of the held lock if another process is to release or extend it: Lock(client, name, id=id)"
        )

    @abstractmethod
    def _me(self) -> Any:
        """Return the thread or task that calls."""

    # This acquisition, known without asking

    @property
    def id(self) -> str | None:
        """The owner id of this acquisition: the right to extend and release it; None before the first one.

        Raises NotAcquired or LockLost when it has ended.
        """
        if self._given_id is not None:
            return self._given_id
        lease = self._latest()
        if lease is None:
            self._raise_if_ended()
        return None if lease is None else lease.id

    @property
    def fence(self) -> int:
        """The fencing number of this acquisition: larger than every earlier one of the same name.

        Raises NotAcquired, also when it was released, and LockLost when `release` has told so.
        """
        lease = self._latest()
        if lease is None:
            self._raise_if_ended()
            raise NotAcquired(self.name)
        return lease.fence

    @property
    def lost(self) -> LossRecord | None:
        """Why this acquisition was lost, or None while it is held; local and free."""
        lease = self._latest()
        return self._leases.past_loss(self._me()) if lease is None else lease.loss

    def raise_if_lost(self) -> None:
        """Raise LockLost if this acquisition was lost: call it before each irreversible step. Local and free.

        Raises NotAcquired when there is none.
        """
        lease = self._latest()
        if lease is None:
            self._raise_if_ended()
        self._raise_loss(self._own() if lease is None or lease.inherited_by_fork else lease)

    @property
    def local(self) -> Local:
        """`local.token` is `id` in redis-py's words: bytes, and None instead of an error where there is none."""
        return Local(self)

    # The steps of each operation; `Lock` and `AsyncLock` have them done

    def _acquire(self, timeout: float | None, listening: bool) -> Operation[bool]:
        me, turn = self._me(), object()
        # With an id of the caller's choice Redis cannot tell this object's threads or tasks apart; one would wait for itself.
        # In a forked child, acquisitions that the parent's threads began never end.
        key = process.pid, me if self._given_id is None else None
        try:
            if self._coming.setdefault(key, turn) is not turn:
                raise AlreadyAcquired(self.name)
            if self._leases:
                self._forget_the_gone()
                for other, before in list(self._leases.items()):
                    if (
                        (other is me or self._given_id is not None)
                        and not before.inherited_by_fork
                        and before.loss is None
                    ):
                        raise AlreadyAcquired(self.name)
            return (yield from self._acquire_now(me, timeout, listening))
        finally:
            if self._coming.get(key) is turn:
                del self._coming[key]

    def _acquire_now(self, me: Any, timeout: float | None, listening: bool) -> Operation[bool]:
        claim = self._new_claim(timeout)
        lease = claim.lease
        try:
            mine = (
                holders.leases_of(self._server, self._keys, me) if timeout != 0 and self._is_kept_waiting(me) else None
            )
            steps = self._acquire_again(claim, mine, listening) if mine else operations.acquire(claim, listening)
            if not (yield from steps) or not self._begins(lease):
                return False
            self._leases[me] = lease
            holders.add(lease)
            self._watch(lease)
            self._tell("acquired", lease)
        except GeneratorExit:
            raise
        except BaseException:
            if lease.fence:  # acquired, and interrupted on the way out
                self._stop(lease)
                self._forget(lease)
                with suppress(LockError):
                    yield from operations.release(lease)
            raise
        return True

    def _watch(self, lease: Lease) -> None:
        watchdog.add(lease, self.auto_renewal)

    def _is_kept_waiting(self, me: Any) -> bool:
        """Whether the holder to be can do nothing else while it waits."""
        return True

    def _acquire_again(self, claim: operations.AcquireRequest, mine: list[Lease], listening: bool) -> Operation[bool]:
        """Acquire what the caller may hold already, or tell it that it would wait for itself."""
        timeout, since = claim.timeout, monotonic()
        claim.timeout = 0.0  # what was lost unnoticed may be free
        if (yield from operations.acquire(claim, False)):
            return True
        mine = [lease for lease in mine if lease.id != claim.lease.id and lease.loss is None]
        if timeout is None and any(map(_is_endless, mine)):
            raise AlreadyAcquired(self.name)
        if mine:
            events.log.warning(SELF_WAIT, self.name, mine[0].fence)
        claim.timeout = None if timeout is None else max(0.0, since + timeout - monotonic())
        return (yield from operations.acquire(claim, listening))

    def _new_claim(self, timeout: float | None) -> operations.AcquireRequest:
        token = self._tokens.get(self._me()) if self._tokens else None
        if token is not None:
            return operations.AcquireRequest(
                self._new_lease(token.id), token.marked(self._record()), timeout, given_id=True
            )
        lease = self._new_lease(self._given_id or records.new_id())
        return operations.AcquireRequest(lease, self._record(), timeout, given_id=self._given_id is not None)

    def _begins(self, lease: Lease) -> bool:
        """Tell whether this answer of the server begins an acquisition."""
        token = self._tokens.get(lease.acquirer) if self._tokens else None
        if token is not None:
            token.refused = lease.shared and not token.mine
            return not token.refused
        return True

    def _record(self) -> bytes:
        """Return the record about the holder, for `owner()` and lists."""
        return records.record(self.kind, self.label, self.expire, self.auto_renewal)

    def _release(self) -> Operation[None]:
        lease = self._own()
        self._stop(lease)
        if lease.loss is None:
            try:
                released = yield from operations.release(lease)
            except (LockError, GeneratorExit):
                raise
            except BaseException:  # interrupted: it may be repeated safely, and should not be left to its expiry
                with suppress(LockError):
                    yield from operations.release(lease)
                raise
            if not released:
                lease.lose((yield from find_cause(lease)))
        self._forget(lease)
        if lease.noted_loss is not None:
            self._raise_loss(lease)
        self._tell("released", lease)

    def _exit(self, error: BaseException | None) -> Operation[None]:
        lease = self._leases.get(self._me())
        if lease is not None and lease.inherited_by_fork:  # a forked child leaves its copy of the parent's block
            self._forget(lease)
            return
        try:
            yield from self._release()
        except LockError as failure:
            if error is None:
                raise
            events.log.warning("Lock %r could not be released after its block failed: %s", self.name, failure)
            chain(error, failure)

    def _extend(self, expire: Seconds | None) -> Operation[Literal[True]]:
        seconds = None if expire is None else check_expire(expire)
        lease = self._own()
        if lease.loss is None:
            if seconds is not None:
                lease.change(seconds)
                watchdog.hurry(lease)
            yield from self._renew(lease)
        self._raise_loss(lease)
        return True

    def _renew(self, lease: Lease) -> Operation[None]:
        if not (yield from operations.renew(lease)):
            watchdog.remove(lease)
            lease.lose((yield from find_cause(lease)))

    def _token(self) -> str | None:
        """Return the id of the caller's acquisition, or the given id."""
        lease = self._leases.get(self._me())
        return lease.id if lease is not None and not lease.inherited_by_fork else self._given_id

    def _owner(self) -> Operation[LockInfo | None]:
        (held,) = yield from operations.read([self.name], [self._keys])
        return None if held is None else held.info

    def _owned(self) -> Operation[bool]:
        mine = self._token()
        holder = yield from self._owner()
        return holder is not None and holder.id == mine

    def _reset(self, fence: int | None, by: object, reason: str) -> Operation[bool]:
        check_reason(reason)
        freed = (yield from operations.reset(self.name, self._keys, fence, by, reason)) == 1
        if freed:
            report_reset(
                f"Lock {self.name!r} (fence {'any' if fence is None else fence})", self.name, fence, by, reason
            )
        return freed

    # Acquisitions

    def _new_lease(self, id: str) -> Lease:
        return self._lease_kind(
            self._server, self.name, self._keys, id, self.expire, self._me(), self.max_hold, weakref.ref(self)
        )

    def _own(self) -> Lease:
        """Return the caller's acquisition, or that of the given id, wherever it was acquired."""
        lease = self._leases.get(self._me())
        if lease is not None and not lease.inherited_by_fork:
            return lease
        if self._given_id is None or lease is not None:
            raise NotAcquired(self.name)
        lease = self._new_lease(self._given_id)
        lease.note_acquired(0, monotonic())
        return lease

    def _latest(self) -> Lease | None:
        """Return the acquisition that the caller may look at: its own, or the only one if it never had one."""
        return self._leases.told() or self._leases.seen(self._me())

    def _raise_if_ended(self) -> None:
        me = self._me()
        if self._leases.ended(me):
            loss = self._leases.past_loss(me)
            raise NotAcquired(self.name) if loss is None else LockLost(self.name, loss)

    def _stop(self, lease: Lease) -> None:
        """Let the lease end: it is not renewed any more, and who asks for the lock waits for its expiry at most."""
        watchdog.remove(lease)
        holders.remove(lease)

    def _forget_the_gone(self) -> None:
        """Forget acquisitions that nobody will ask for: left through another object, or lost, of threads and tasks that ended."""
        for lease in list(self._leases.values()):
            if not lease.inherited_by_fork and (
                not lease.hold_count or (lease.loss is not None and acquirer_ended(lease))
            ):
                self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        lease.hold_count = 0
        if self._leases.get(lease.acquirer) is lease:
            self._leases.end(lease.acquirer, lease.noted_loss)

    def _call_on_lost(self, lease: Lease) -> None:
        if self.on_lost is not None:
            try:
                with self._leases.telling_of(lease):
                    self.on_lost(self)
            except Exception:
                events.log.exception("on_lost of lock %r failed.", self.name)

    def _raise_loss(self, lease: Lease) -> None:
        if lease.loss is not None:
            if lease.fence == 0:  # an id given, not acquired here
                raise NotAcquired(self.name)
            raise LockLost(self.name, lease.loss)

    def _tell(self, event: str, lease: Lease) -> None:
        name, fence = self.name, lease.fence
        events.emit(event, TOLD[event], name, fence, name=name, fence=fence)


def _is_endless(lease: Lease) -> bool:
    """Whether the acquisition is renewed for as long as its owner lives."""
    holder = lease.lock_ref()
    return lease.max_hold is None and (holder is None or holder.auto_renewal)


def chain(error: BaseException, failure: BaseException) -> None:
    """Hang the failure under the end of the error's own chain, so that a traceback shows both."""
    failure.__context__ = None  # raised while the error was handled, it leads back to it: the chain would have no end
    while error.__context__ is not None:
        error = error.__context__
    if error is not failure:
        error.__context__ = failure

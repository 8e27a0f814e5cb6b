"""Locks and database transactions: a lock that is held until the commit hides unfinished writes from the next holder.

Django's ``on_commit`` cannot release a lock, because a rollback does not call it, and a rollback to a savepoint
discards it. But every transaction ends in one of three methods of its connection, which ``atomic`` calls, too. They are
wrapped as soon as a lock waits for the end of a transaction of that connection.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from django.db import Error, connections
from django.db.backends.signals import connection_created
from django.dispatch import receiver

from .core import events
from .exceptions import LockError, LockLost, NotAcquired

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from .core.lease import Lease
    from .core.lock import Lock
    from .exceptions import LossRecord


class UntilCommit:
    """Releases a lock after the commit or the rollback of the open transactions; it is renewed until then.

    If the lock is lost before the commit, the commit becomes a rollback and raises LockLost. Errors of a release after
    a transaction are logged. Inside a Django TestCase, where nothing is committed, a lock is released at the end of its
    block. Give it to re-entrant locks, so that a transaction does not wait for itself.
    """

    def watch(self, lease: Lease) -> None:
        """Let no commit of this thread go through once the lock was lost."""
        # Around ``atomic()`` nothing waits for a commit: that of a block whose lock was lost went through.
        _held.releases.setdefault(lease, 0)
        for connection in _connections():
            _hooks_of(connection)

    def postpones(self, lock: Lock, acquirer: Any) -> bool:
        """Release the lock after the open transactions of this thread; return whether there are any."""
        transactions = {connection for connection in _connections() if _in_transaction(connection)}
        if not transactions:
            return False
        loss = _loss_of(lock, acquirer)
        if loss is not None:
            for connection in transactions:  # the caller gets LockLost now: one who catches it must not commit
                _hooks_of(connection).loss = loss
            return False
        lease = lock._require_lease(acquirer)
        waiting = _held.releases.get(lease, 0)
        if waiting == lease.hold_count:  # every entry is left already
            raise NotAcquired(lock.name)
        _held.releases[lease] = waiting + 1
        for connection in transactions:
            _hooks_of(connection).waiting.append((lock, acquirer, transactions))
        return True


class WarnBeforeCommit:
    """Logs a warning, once for each place in the code, when a lock is released before the commit by mistake."""

    def watch(self, lease: Lease) -> None:
        """Do nothing: only the release matters."""

    def postpones(self, lock: Lock, acquirer: Any) -> bool:
        """Warn if an atomic block is open, and return False. The end of an inner block is no release."""
        for connection in _connections():
            if in_atomic(connection):
                lease = lock._lease_of(acquirer)
                if lock._given_id is not None if lease is None else lease.hold_count <= 1:
                    _warn_before_commit(lock.name)
                break
        return False


UNTIL_COMMIT, WARN_BEFORE_COMMIT = UntilCommit(), WarnBeforeCommit()


def _loss_of(lock: Lock, acquirer: Any) -> LossRecord | None:
    """Return why the acquirer's acquisition was lost, which another thread may have entered than the calling one."""
    lease = lock._lease_of(acquirer)
    return lock._leases.past_loss(acquirer) if lease is None else lease.loss


def _release_after_transactions(lock: Lock, acquirer: Any) -> None:
    lease = lock._lease_of(acquirer)
    if lease is not None:
        _held.releases[lease] = _held.releases.get(lease, 1) - 1
    try:
        lock._end_block(acquirer, now=True)
    except LockLost:
        pass  # the error was logged, and the commit is done
    except LockError as error:
        stays = "" if isinstance(error, NotAcquired) else ", so it stays held until it expires"
        events.log.warning("Lock %r could not be released after its transaction%s: %s", lock.name, stays, error)


class _Held(threading.local):
    """The acquisitions of this thread that no commit may outlive, and some that were released."""

    def __init__(self) -> None:
        self.releases: weakref.WeakKeyDictionary[Lease, int] = weakref.WeakKeyDictionary()
        """How many releases of each wait for the end of a transaction."""


_held = _Held()


@receiver(connection_created)
def _hook_new(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    """Wrap the methods of a connection that this thread opens while it holds such a lock."""
    if _held.releases:
        _hooks_of(connection)


class _TransactionHooks:
    """Wraps the methods of a connection that end a transaction: so that no commit outlives a lock that was lost, and to
    release the locks that wait for that end.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.waiting: list[tuple[Lock, Any, set[BaseDatabaseWrapper]]] = []
        """Each lock, with its acquirer and all connections whose transactions it waits for."""
        self.loss: LossRecord | None = None
        """The loss of a lock whose block was left inside this transaction."""
        self._ends = False
        """Whether a commit or a rollback began and did not succeed."""
        self._connection = connection
        self._commit, self._rollback, self._close = connection.commit, connection.rollback, connection.close
        self._set_autocommit = connection.set_autocommit
        vars(connection).update(commit=self.commit, rollback=self.rollback, close=self.close)
        vars(connection).update(set_autocommit=self.set_autocommit)

    def commit(self) -> None:
        held = [lease.loss for lease in list(_held.releases) if lease.hold_count]
        for loss in [self.loss, *self._losses(), *held]:
            if loss is not None:
                self.rollback()
                raise LockLost(loss.name, loss)
        self._end(self._commit)

    def rollback(self) -> None:
        self._end(self._rollback)

    def _end(self, end: Callable[[], None]) -> None:
        self._ends = True
        end()
        self._ends, self.loss = False, None
        if self._release_waiting():
            # Autocommit is still off: PostgreSQL refused to switch it on while a query of a listener was in a
            # transaction of its own, and the commit that had succeeded looked like a failure.
            with suppress(Error):
                self._commit()

    def close(self) -> None:
        try:
            self._close()
        finally:
            if self._connection.connection is None or self._connection.closed_in_transaction:
                self.loss = None
                self._release_waiting()

    def set_autocommit(self, autocommit: bool, *args: Any, **kwargs: Any) -> None:
        if not autocommit or not (self.waiting or self.loss) or self._connection.in_atomic_block:
            self._set_autocommit(autocommit, *args, **kwargs)
            return
        # SQLite and MySQL commit now, and PostgreSQL refuses. What a handler of signals interrupted before the rollback
        # must not be committed by that, and neither what was written after the loss of a lock.
        loss = next(filter(None, [self.loss, *self._losses()]), None)
        try:
            if loss is not None or self._ends:
                self.rollback()
        finally:
            self._set_autocommit(autocommit, *args, **kwargs)
        self._release_waiting()
        if loss is not None:
            raise LockLost(loss.name, loss)

    def _release_waiting(self) -> bool:
        """Release the locks that wait for no other connection; return whether any waited."""
        waiting, self.waiting = self.waiting, []
        with ExitStack() as stack:  # all are released, even if a signal handler raises during the release of another
            for lock, acquirer, transactions in waiting:
                transactions.discard(self._connection)
                if not transactions:
                    stack.callback(_release_after_transactions, lock, acquirer)
        return bool(waiting)

    def _losses(self) -> list[LossRecord | None]:
        return [_loss_of(lock, acquirer) for lock, acquirer, _ in self.waiting]


def _hooks_of(connection: BaseDatabaseWrapper) -> _TransactionHooks:
    hooks = getattr(connection.commit, "__self__", None)
    return hooks if isinstance(hooks, _TransactionHooks) else _TransactionHooks(connection)


def _connections() -> Iterable[BaseDatabaseWrapper]:
    """Return the same as ``connections.all(initialized_only=True)``, and quicker.

    That method reads Django's settings and asyncio's state twice for each connection, which is slow beside a lock.
    """
    if isinstance(_storage, threading.local) and "cvar" not in (found := vars(_storage)):
        return found.values()
    return connections.all(initialized_only=True)


_storage: object = getattr(getattr(connections, "_connections", None), "_storage", None)
"""Where asgiref's `Local` stores the values of a thread. The values of tasks are in its attribute `cvar`."""


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    if not connection.in_atomic_block:
        return connection.connection is not None and not connection.autocommit
    return not connection.closed_in_transaction and not any(map(_of_test_case, connection.atomic_blocks[:1]))


def in_atomic(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the connection is in an atomic block other than those of Django's TestCase."""
    return connection.in_atomic_block and not all(map(_of_test_case, connection.atomic_blocks))


def _of_test_case(block: object) -> bool:
    return getattr(block, "_from_testcase", False)


_places_warned: set[tuple[str, int]] = set()


def _warn_before_commit(name: str) -> None:
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("django_redislock", "contextlib"):
        frame = frame.f_back
    # By place and not by name, because the mistake is in the code, and there may be any number of names.
    place = frame.f_code.co_filename, frame.f_lineno
    if place not in _places_warned:
        _places_warned.add(place)
        events.log.warning(
            "Lock %r was released inside an atomic block (%s, line %d), so the next holder does not see the writes "
            "before the commit. Acquire the lock outside of the block, as locked_atomic() does, or give it "
            "until_commit=True. If it protects nothing in the database, give it until_commit=False. This is logged "
            "once for each place.",
            name,
            *place,
        )

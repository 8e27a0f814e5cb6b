"""Locks and database transactions: until the commit nobody else sees what was written under the lock.

Django's ``on_commit`` would not do to release one: it is not called after a rollback, and forgotten with a savepoint. But
every transaction ends in one of three methods of its connection, which ``atomic`` calls too; from the first lock that waits
for a transaction on, those of its connection are wrapped.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from django.db import connections

from .core import events
from .core.base import BaseLock
from .core.lock import Lock, RLock
from .exceptions import LockError, LockLost

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from .core.driver.effects import Operation
    from .core.lease import Lease


class UntilCommitLock(RLock):
    """A lock that is released when the transactions in which its block ends are over, whichever way, and renewed until then.

    So that a transaction does not wait for itself, it may take the same lock again, as with an `RLock`. A lock that was lost
    before the commit makes it a rollback and raises LockLost.

    Inside a Django TestCase, where nothing is ever committed, it is released at the end of its block.
    """

    def release(self) -> None:
        """Release the lock when the open transactions of this thread are over, at once when there are none.

        Raises what `Lock.release` does; what fails after the transaction is logged.
        """
        transactions = _open_transactions()
        if not transactions or self.lost is not None:
            super().release()
            return
        self._require_lease(self._acquirer())  # raises NotAcquired
        self._release_after(transactions)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        transactions = _open_transactions()
        if not transactions or self.lost is not None:
            super().__exit__(kind, error, trace)
        else:
            self._release_after(transactions)

    def _release_after(self, transactions: set[BaseDatabaseWrapper]) -> None:
        for connection in transactions:
            _ending_of(connection).waiting.append((self, transactions))

    def _transactions_over(self) -> None:
        try:
            super().__exit__(None, None, None)
        except LockLost:
            pass  # it has been logged, and the commit that matters was before
        except LockError as error:
            events.log.warning("Lock %r could not be released after its transaction: %s", self.name, error)


class Watched(BaseLock):
    """Makes a lock say so, once for each place in the code, when it is released before the commit by mistake."""

    def _release(self, lease: Lease) -> Operation[None]:
        _warn_before_commit(self.name)
        return super()._release(lease)


class WatchedLock(Watched, Lock):
    """A lock that is not meant to be released inside a transaction."""


class WatchedRLock(Watched, RLock):
    """A re-entrant one; to leave an inner block of it is no release."""

    def _release(self, lease: Lease) -> Operation[None]:
        return super()._release(lease) if lease.hold_count == 1 else RLock._release(self, lease)


class _Ending:
    """Wraps what ends a transaction of the connection, and releases then what waits for it."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.waiting: list[tuple[UntilCommitLock, set[BaseDatabaseWrapper]]] = []
        """Each lock with all the connections whose transactions it waits for."""
        self._connection = connection
        self._commit, self._rollback, self._close = connection.commit, connection.rollback, connection.close
        vars(connection).update(commit=self.commit, rollback=self.rollback, close=self.close)

    def commit(self) -> None:
        for lock, _ in self.waiting:
            if lock.lost is not None:
                loss = lock.lost
                self.rollback()
                raise LockLost(loss.name, loss)
        self._commit()
        self._over()

    def rollback(self) -> None:
        self._rollback()
        self._over()

    def close(self) -> None:
        try:
            self._close()
        finally:
            if self._connection.connection is None or self._connection.closed_in_transaction:
                self._over()

    def _over(self) -> None:
        waiting, self.waiting = self.waiting, []
        with ExitStack() as stack:  # each gets its turn, whatever a signal handler raises in that of another
            for lock, transactions in waiting:
                transactions.discard(self._connection)
                if not transactions:
                    stack.callback(lock._transactions_over)


def _ending_of(connection: BaseDatabaseWrapper) -> _Ending:
    ending = getattr(connection.commit, "__self__", None)
    return ending if isinstance(ending, _Ending) else _Ending(connection)


def _open_transactions() -> set[BaseDatabaseWrapper]:
    """Return this thread's connections that are in a transaction which will end in a commit or a rollback."""
    return {connection for connection in _connections() if _in_transaction(connection)}


def _connections() -> Iterable[BaseDatabaseWrapper]:
    """Return this thread's connections: those of ``connections.all(initialized_only=True)``.

    That one asks Django's settings and asyncio for each of them, twice, and would be a good part of what a lock costs.
    """
    if isinstance(_storage, threading.local) and "cvar" not in (here := vars(_storage)):
        return here.values()
    return connections.all(initialized_only=True)


_storage: object = getattr(connections._connections, "_storage", None)  # type: ignore[attr-defined]
"""Where asgiref's `Local` keeps what belongs to a thread; what belongs to tasks is in its attribute `cvar`."""


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    if not connection.in_atomic_block:
        return connection.connection is not None and not connection.autocommit
    return not connection.closed_in_transaction and not any(map(_of_test_case, connection.atomic_blocks[:1]))


def in_atomic(connection: BaseDatabaseWrapper) -> bool:
    """Whether the connection is in an atomic block, those of Django's TestCase aside."""
    return connection.in_atomic_block and not all(map(_of_test_case, connection.atomic_blocks))


def _of_test_case(block: object) -> bool:
    return getattr(block, "_from_testcase", False)


_told: set[tuple[str, int]] = set()


def _warn_before_commit(name: str) -> None:
    for connection in _connections():
        if in_atomic(connection):
            break
    else:
        return
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("django_redislock", "contextlib"):
        frame = frame.f_back
    # By place and not by name, for names are without number, and the mistake is in the code.
    place = frame.f_code.co_filename, frame.f_lineno
    if place not in _told:
        _told.add(place)
        events.log.warning(
            "Lock %r was released inside an atomic block (%s, line %d): until its commit the next holder does not see what "
            "was written. Take the lock outside of the block (locked_atomic() does) or give it until_commit=True; if it "
            "guards nothing in the database, until_commit=False. This is said once for each place in the code.",
            name,
            *place,
        )

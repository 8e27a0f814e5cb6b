"""The current execution, as its body sees it, and the release of its lock."""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar

from ..core import Lock, events
from ..exceptions import LockBackendError, LockError, LockLost, LossRecord, NotAcquired
from .execution_lock import ExecutionLock


class Execution:
    """One execution of a single-instance task, as its body sees it: ``self.single_instance``. It runs inside its
    ``with`` block."""

    def __init__(self, task: str, task_id: str | None = None, lock: Lock | None = None) -> None:
        self.task = task
        self.task_id = task_id
        """None in a direct call."""
        self.lock = lock
        """None in a call that takes no lock."""
        self._over = False

    def __enter__(self) -> None:
        self._outer = executions()
        _executions.set((*self._outer, self))

    def __exit__(self, *error: object) -> None:
        self._over = True
        _executions.set(self._outer)

    @property
    def lost(self) -> LossRecord | None:
        """Why the lock was lost, or None while it is held. No call to Redis."""
        return None if self.lock is None else self.lock.lost

    def raise_if_lost(self) -> None:
        """Raise LockLost if the lock was lost: call it before each irreversible step. No call to Redis."""
        if self.lost is not None:
            raise LockLost(self.lost.name, self.lost)


_executions: ContextVar[tuple[Execution, ...]] = ContextVar("executions", default=())


def executions() -> tuple[Execution, ...]:
    """Return the executions of this context, outermost first, because a task may call itself or be applied within
    itself.

    Coroutines of a body, and the threads that they start, have its context. They may run longer than the execution.
    """
    return tuple(execution for execution in _executions.get() if not execution._over)


def release_quietly(lock: Lock) -> None:
    """Release the lock if it is held; log an error of Redis instead of raising it."""
    try:
        lock.release()
    except NotAcquired:
        pass  # a duplicate, or Redis did not answer at the start
    except LockLost:
        pass  # reported when it was noticed; the body's outcome stands
    except LockBackendError as error:
        events.log.warning("%s could not release its lock, which ends by its expiry: %s", lock.label, error)
    except BaseException:  # a soft time limit, in the middle of it
        with suppress(LockError):
            lock.release()
        raise


def leave_queue(queued: ExecutionLock | None) -> ExecutionLock | None:
    """Release the lock that the message held while it waited; return it when Redis did not answer."""
    if queued is not None:
        try:
            queued.release_given_id()
        except LockBackendError as error:
            events.log.warning(
                "%s could not release the lock of its message, which ends by its expiry: %s", queued.label, error
            )
            return queued
    return None

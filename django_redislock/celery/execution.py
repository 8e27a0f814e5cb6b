"""The execution of a single-instance task, as its body sees it."""

from __future__ import annotations

from contextvars import ContextVar

from ..core import Lock
from ..exceptions import LockLost, LossRecord


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

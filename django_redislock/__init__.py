"""One distributed lock in Redis for Django and Celery."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connections import get_client
    from .decorator import locked
    from .exceptions import (
        AcquireTimeout,
        AlreadyAcquired,
        LockBackendError,
        LockError,
        LockLost,
        LossRecord,
        NotAcquired,
        StaleFence,
        TaskAlreadyRunning,
    )
    from .locks import (
        alock,
        alock_all,
        asemaphore,
        held_locks,
        lock,
        lock_all,
        locked_atomic,
        reset_all,
        rlock,
        semaphore,
    )
    from .run_once.election import Leader, leader

__version__ = "1.0.0rc1"

__all__ = [
    "AcquireTimeout",
    "AlreadyAcquired",
    "Leader",
    "LockBackendError",
    "LockError",
    "LockLost",
    "LossRecord",
    "NotAcquired",
    "StaleFence",
    "TaskAlreadyRunning",
    "alock",
    "alock_all",
    "asemaphore",
    "get_client",
    "held_locks",
    "leader",
    "lock",
    "lock_all",
    "locked",
    "locked_atomic",
    "reset_all",
    "rlock",
    "semaphore",
]

_MODULES = {
    "get_client": "connections",
    "locked": "decorator",
    "Leader": "run_once.election",
    "leader": "run_once.election",
} | dict.fromkeys(
    (
        *("alock", "alock_all", "asemaphore", "held_locks", "lock", "lock_all", "locked_atomic", "reset_all", "rlock"),
        "semaphore",
    ),
    "locks",
)


def __getattr__(name: str) -> Any:
    """Return a public name, from the module that is imported with its first use: the core does without Django."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES.get(name, 'exceptions')}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

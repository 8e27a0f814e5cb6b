"""One distributed lock in Redis for Django and Celery."""

from __future__ import annotations

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
from .facade import alock, lock, locked, locked_atomic

__version__ = "0.1.0"

__all__ = [
    "AcquireTimeout",
    "AlreadyAcquired",
    "LockBackendError",
    "LockError",
    "LockLost",
    "LossRecord",
    "NotAcquired",
    "StaleFence",
    "TaskAlreadyRunning",
    "alock",
    "lock",
    "locked",
    "locked_atomic",
]

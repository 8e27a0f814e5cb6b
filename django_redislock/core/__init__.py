"""The lock itself: it imports redis-py and the standard library only."""

from __future__ import annotations

from .async_lock import AsyncLock
from .listing import held_locks, reset_all
from .lock import Lock
from .quorum import AsyncQuorumLock, QuorumLock
from .records import LockInfo
from .redis_py import AsyncRedisPyLock, RedisPyLock
from .semaphore import AsyncSemaphore, Semaphore

__all__ = [
    "AsyncLock",
    "AsyncQuorumLock",
    "AsyncRedisPyLock",
    "AsyncSemaphore",
    "Lock",
    "LockInfo",
    "QuorumLock",
    "RedisPyLock",
    "Semaphore",
    "held_locks",
    "reset_all",
]

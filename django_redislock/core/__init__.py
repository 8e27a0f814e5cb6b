"""The lock itself: knows redis-py and the standard library, nothing of Django or Celery."""

from __future__ import annotations

from .aio import AsyncLock, AsyncRLock
from .listing import held_locks, reset_all
from .lock import Lock, RLock
from .owner import LockInfo
from .quorum import QuorumLock

__all__ = ["AsyncLock", "AsyncRLock", "Lock", "LockInfo", "QuorumLock", "RLock", "held_locks", "reset_all"]

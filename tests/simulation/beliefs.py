"""That a thread believes to hold a lock, as a history sees it."""

from __future__ import annotations

from django_redislock.core.lease import Lease

from .world import Process

RECALLED = b"recalled "
"""In front of the id of a lock whose holder was asked to give it back."""


class Belief:
    """That a thread holds the lock."""

    def __init__(self, lease: Lease, epoch: float, began: float) -> None:
        self.lease = lease
        self.began = began
        self.expire = lease.expire  # before an extension
        self.epoch = epoch
        self.undone_at = 0.0
        """When a failover gave the lock back last that somebody else had released."""
        self.forced_at: float | None = None
        """When somebody else released the lock."""
        self.asked_since: float | None = None
        """Since when the lock is seen to be recalled."""
        self.shortened = False
        self.process: Process = lease.server  # type: ignore[assignment]

    @property
    def stands(self) -> bool:
        """Whether the holder would say so itself."""
        lease = self.lease
        return self.process.alive and not lease._losses and self.process.clock() < lease.deadline

    @property
    def excludes(self) -> bool:
        """Whether nobody else may hold the lock. The acquirer may cut it short, or end it, for all who use its id."""
        return self.stands and self.forced_at is None and not (self.shortened and self.lease.shared)

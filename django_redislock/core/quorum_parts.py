"""The parts of a quorum lock: one on each of the servers."""

from __future__ import annotations

import asyncio

from ..exceptions import LockBackendError
from .clock import monotonic
from .driver.server import Server
from .lease import Lease

DRIFT, SHORTEST_DRIFT = 0.01, 0.002
"""The share of the expiry, and the seconds, by which clocks may differ until then: as in Redlock."""


def drift_of(expire: float) -> float:
    """Return the seconds by which an expiry ends earlier for this process than on the server."""
    return expire * DRIFT + SHORTEST_DRIFT


class PartLease(Lease):
    """The lease on one server. Its loss is not yet the loss of the quorum lock, and its server is not tried again."""

    __slots__ = ()
    retry_for = 0.0
    reports_waits = False

    def renewed(self, sent: float, expire: float) -> None:
        super().renewed(sent - drift_of(expire), expire)

    def change(self, expire: float) -> None:
        super().change(expire)
        self.deadline = min(self.deadline, monotonic() + expire - drift_of(expire))

    def watch_acquirer(self) -> None:
        whole = self.lock_ref()
        self._end_of_acquirer = None if whole is None else whole.end_of_acquirer

    def report_loss(self) -> None:
        whole = self.lock_ref()
        if whole is not None:
            whole.note_lost_part()


class Part:
    """The part on one server: held, or asked for, or neither."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.lease: PartLease | None = None
        """The lease that was granted last."""
        self.task: asyncio.Task[None] | None = None
        """The task that asks for the part."""
        self.answered = False
        """Whether the server has answered the last task."""
        self.error: LockBackendError | None = None
        """Why the server did not answer."""
        self.retry_at = 0.0

    @property
    def held(self) -> bool:
        """Whether it is held, as far as this process knows; any thread may ask."""
        lease = self.lease
        return lease is not None and lease.loss is None

"""Defects of quorum locks, of replicated servers and of Clusters, planted as those of `planted` are."""

from __future__ import annotations

from typing import Any

from redis.exceptions import RedisError

from django_redislock.core import quorum_attempt, quorum_parts, scripts
from django_redislock.core.driver import replicated
from django_redislock.core.driver.cluster import routes, table
from django_redislock.core.driver.cluster.table import SlotTable
from django_redislock.core.operations import AcquireRequest
from django_redislock.core.quorum_attempt import PartRequest, QuorumAttempt
from django_redislock.core.quorum_lease import QuorumLease

from .patches import Planted, attribute


def _fewer_suffice(self: QuorumAttempt, servers: list[Any], template: Any, acquirer: Any) -> None:
    _new_attempt(self, servers, template, acquirer)
    self._needed -= 1


def _one_id(self: QuorumAttempt, server: Any) -> Any:
    lease = _new_lease(self, server)
    lease.id = f"{self.id}.0"
    return lease


def _own_ticket(self: PartRequest, channel: bytes, join: bool, ticket: bytes) -> Any:
    if ticket:
        self.part.answered, self.part.error, self.part.server.left_out_until = True, None, 0.0
        self.whole.ticket = self.whole.ticket or ticket
    return AcquireRequest.call(self, channel, join, ticket)


async def _keeps(self: QuorumAttempt, held: list[Any]) -> None:
    return None


async def _only_stops(self: QuorumAttempt) -> None:
    self._stop()


_new_attempt, _new_lease = QuorumAttempt.__init__, QuorumAttempt._new_lease


def _nothing_confirmed(call: Any, reply: Any, confirmations: Any, wait: Any) -> Any:
    return reply


def _unconfirmed_renewals(self: Any, call: Any, patience: float) -> Any:
    return super(replicated.Confirming, self).renew(call, patience)


def _moved_to_nobody(self: SlotTable, error: Any, asked: Any) -> Any:
    return asked


QUORUM: dict[str, Planted] = {
    "half of the servers suffice": lambda: attribute(QuorumAttempt, "__init__", _fewer_suffice),
    "the drift of clocks is not allowed for": lambda: attribute(quorum_parts, "drift_of", lambda expire: 0.0),
    "a failed attempt gives nothing back": lambda: attribute(QuorumAttempt, "_give_back", _only_stops),
    "the loss of most parts is not noticed": lambda: attribute(QuorumLease, "_report_loss", lambda self: None),
    "a silent server is waited for": lambda: attribute(quorum_attempt, "GRACE", 60.0),
    "each part has a ticket of its own": lambda: attribute(PartRequest, "call", _own_ticket),
}
QUORUM_NOT_FOUND: dict[str, Planted] = {
    "a lost part is not taken anew": lambda: attribute(QuorumLease, "mend", lambda self: None),
    "too few parts are kept": lambda: attribute(QuorumAttempt, "_give_to_earlier", _keeps),
    "all tries have one id": lambda: attribute(QuorumAttempt, "_new_lease", _one_id),
}
REPLICAS: dict[str, Planted] = {
    "an acquisition is not confirmed by the replica": lambda: attribute(
        scripts.ACQUIRE, "granted", lambda reply: False
    ),
    "a renewal is not confirmed by the replica": lambda: attribute(
        replicated.Confirming, "renew", _unconfirmed_renewals
    ),
    "no confirmation is needed": lambda: attribute(replicated, "_judged", _nothing_confirmed),
}
CLUSTER: dict[str, Planted] = {
    "a call does not follow its slot": lambda: attribute(SlotTable, "redirect", _moved_to_nobody),
    "an empty table replaces a better one": lambda: attribute(table, "slots_in", lambda reply: table.SLOTS),
    "a slot that moves is an error": lambda: attribute(routes, "NotNow", RedisError),
}

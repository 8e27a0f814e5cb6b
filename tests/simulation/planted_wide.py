"""Defects of quorum locks, of replicated servers and of Clusters, planted as those of `planted` are."""

from __future__ import annotations

from typing import Any

from redis.exceptions import RedisError

from django_redislock.core import quorum, scripts
from django_redislock.core.driver import replicated
from django_redislock.core.driver.cluster import routes, table
from django_redislock.core.driver.cluster.table import SlotTable
from django_redislock.core.quorum import QuorumLease

from .patches import Defect


def _fewer_suffice(self: QuorumLease, needed: int, *args: Any) -> None:
    _new_lease(self, needed - 1, *args)


def _only_forgets(self: QuorumLease) -> None:
    self.ended = True
    self.stop()
    self.parts.clear()


def _keeps_all(self: QuorumLease) -> None:
    """Do nothing."""


_new_lease = QuorumLease.__init__


def _nothing_confirmed(call: Any, reply: Any, confirmations: Any, wait: Any) -> Any:
    return reply


def _unconfirmed_renewals(self: Any, call: Any, patience: float) -> Any:
    return super(replicated.Confirming, self).renew(call, patience)


def _moved_to_nobody(self: SlotTable, error: Any, asked: Any) -> Any:
    return asked


QUORUM: dict[str, Defect] = {
    "half of the servers suffice": (QuorumLease, "__init__", _fewer_suffice),
    "the drift of clocks is not allowed for": (quorum, "drift_of", lambda expire: 0.0),
    "a failed attempt gives nothing back": (QuorumLease, "give_back", _only_forgets),
    "the loss of most locks is not noticed": (QuorumLease, "lose", lambda self, cause: None),
    "a silent server is waited for": (quorum, "SHORTEST_ANSWER", 60.0),
    "too few locks are kept": (QuorumLease, "give_back", _keeps_all),
}
REPLICAS: dict[str, Defect] = {
    "an acquisition is not confirmed by the replica": (scripts.ACQUIRE, "granted", lambda reply: False),
    "a renewal is not confirmed by the replica": (replicated.Confirming, "renew", _unconfirmed_renewals),
    "no confirmation is needed": (replicated, "_judged", _nothing_confirmed),
}
CLUSTER: dict[str, Defect] = {
    "a call does not follow its slot": (SlotTable, "redirect", _moved_to_nobody),
    "an empty table replaces a better one": (table, "slots_in", lambda reply: table.SLOTS),
    "a slot that moves is an error": (routes, "NotNow", RedisError),
}

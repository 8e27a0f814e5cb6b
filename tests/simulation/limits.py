"""Histories of tasks of which several run at once: at most so many bodies of a key, and one copy of each message."""

from __future__ import annotations

import random
from typing import Any

from django_redislock.celery.execution_lock import Delivery

from .driver import Thread
from .tasks import CeleryHistory
from .worker import Body, Message
from .world import Plan


class LimitHistory(CeleryHistory):
    """Some workers, which are publishers, too, and messages of which some run at once."""

    kind = "limits"

    def __init__(self, plan: Plan) -> None:
        self.limits = plan.options["limits"]
        super().__init__(plan)

    @classmethod
    def draw(cls, seed: int) -> Plan:
        plan, chance = super().draw(seed), random.Random(-seed - 1)
        more = super().draw(seed + 1_000_003)  # more messages, or nobody would wait
        plan.threads += more.threads
        plan.processes = max(plan.processes, more.processes)
        limits = chance.choice([[1], [2], [2], [3], [1, 2, 3], [2, 3]])
        plan.options |= {"scope": chance.choice(["run", "queued+run"]), "limits": limits}
        return plan

    def lock_of_run(self, thread: Thread, name: str, message: Message, delivery: Delivery) -> Any:
        return self.lock_of(thread, name, message, limit=self.chance.choice(self.limits), delivery=delivery)

    def see_others(self, body: Body, others: list[Body]) -> None:
        """See that all have slots and fences of their own, that no two are copies, and that they are not too many."""
        for other in others:
            for what in ("message", "lease.keys.lock", "lease.fence"):
                if _of(body, what) == _of(other, what):
                    self.fail(f"{body.message} and {other.message} have the same {what}: {_of(body, what)}")
        if len(others) >= max(self.limits):
            self.fail(f"{[each.message for each in (body, *others)]} run at once, more than {max(self.limits)}")


def _of(body: Body, what: str) -> Any:
    found: Any = body
    for name in what.split("."):
        found = getattr(found, name)
    return found

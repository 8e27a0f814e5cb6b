"""Planted defects of tasks of which several run at once."""

from __future__ import annotations

from typing import Any, Self

from django_redislock.celery import execution_lock
from django_redislock.core import operations
from django_redislock.core.keys import new_id

from .patches import Planted, attribute, script

START, CLAIM = execution_lock.START_SLOT, execution_lock.CLAIM
_with_limit = execution_lock.SlotExecutionLock.with_limit


def _one_more(self: Any, name: str, limit: int, **changes: Any) -> Self:  # type: ignore[misc]
    return _with_limit(self, name, limit + 1, **changes)  # type: ignore[return-value]


def _id_without_message(id: str) -> str:
    return f"{new_id()}/{id.rpartition('/')[2]}"


LIMITS: dict[str, Planted] = {
    "a limit is one higher": lambda: attribute(execution_lock.SlotExecutionLock, "with_limit", _one_more),
    "whoever tries takes a slot": lambda: script(
        START, "return false, redis.call('PTTL', lock)", "return true, redis.call('PTTL', lock)"
    ),
    "a copy is looked for in the first slot only": lambda: script(START, "for i = 2, MAX_SLOTS do", "for i = 2, 1 do"),
    "a copy above a lowered limit is not found": lambda: script(
        START, "for i = 2, MAX_SLOTS do", "for i = 2, tonumber(ARGV[8]) do"
    ),
    "a processed message takes a slot again": lambda: script(START, "if ARGV[9] == '1' then", "if false then"),
    "it is not noted which slot was granted": lambda: attribute(
        operations.AcquireRequest,
        "fence_of",
        lambda self, reply: int(reply if reply == 0 else str(reply, "ascii").split()[0]),
    ),
    "two slots have the same fence": lambda: script(
        START, "local fence = whole(now)", "local fence = whole(now - now % 1e6)"
    ),
}

PARKED: dict[str, Planted] = {
    "nobody is told at a release that messages are parked": lambda: script(
        execution_lock.LEAVE, "return 1 + redis.call('EXISTS', parked)", "return 1"
    ),
    "a message is parked though the lock is free by now": lambda: script(
        execution_lock.PARK, "return wake(", "return false and wake("
    ),
    "who was parked last is woken first": lambda: script(
        execution_lock.PARK, "redis.call('ZADD', parked, ARGV[2]", "redis.call('ZADD', parked, '-' .. ARGV[2]"
    ),
}

NOT_FOUND: dict[str, tuple[str, Planted]] = {
    # The message must be refused for other holders while its copy is in the second slot: 1 of 3,000 histories.
    # Found by test_copies_of_a_message_are_found_in_every_slot_also_above_a_lowered_limit in celery/test_limits.py.
    "a claim sees a copy in the first slot only": (
        "limits",
        lambda: script(CLAIM, "is_slot == '1' and all_slots(lock) or {lock}", "{lock}"),
    ),
    # A copy must start while an execution runs that waited through a silence of its server.
    # Found by test_an_execution_that_asks_anew_after_a_silent_server_is_known_by_its_message there.
    "an execution that asks again has no message": (
        "limits",
        lambda: attribute(operations, "another_id", _id_without_message),
    ),
}

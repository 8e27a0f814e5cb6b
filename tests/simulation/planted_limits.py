"""Planted defects of tasks of which several run at once."""

from __future__ import annotations

from typing import Any, Self

from django_redislock.celery import execution_lock

from .patches import Defect

START, FINISH = execution_lock.START, execution_lock.FINISH
_with_name = execution_lock.ExecutionLock.with_name


def _one_more(self: Any, name: str, limit: int = 0, **changes: Any) -> Self:  # type: ignore[misc]
    return _with_name(self, name, limit=limit and limit + 1, **changes)  # type: ignore[return-value]


LIMITS: dict[str, Defect] = {
    "a limit is one higher": (execution_lock.ExecutionLock, "with_name", _one_more),
    "whoever tries takes a slot": (
        START,
        "return false, redis.call('PTTL', lock)",
        "return true, redis.call('PTTL', lock)",
    ),
    "a copy is looked for in the first slot only": (
        START,
        "local reply = reply_for_copy(slots, values,",
        "local reply = reply_for_copy(slots, {values[1]},",
    ),
    "a copy above a lowered limit is not found": (
        START,
        "local reply = reply_for_copy(slots, values,",
        "local reply = reply_for_copy(slots, {unpack(values, 1, limit)},",
    ),
    "a processed message takes a slot again": (START, "if known == '1' and not slot then", "if false then"),
    "it is not noted which slot was granted": (
        execution_lock.StartRequest,
        "fence_of",
        lambda self, reply: int(reply if isinstance(reply, int) else reply.split()[0]),
    ),
    "two slots have the same fence": (START, "local fence = whole(now)", "local fence = whole(now - now % 1e6)"),
}

NOT_FOUND: dict[str, tuple[str, Defect]] = {
    # The message must be refused for other holders while its copy is in the second slot: 1 of 3,000 histories.
    # Found by test_copies_of_a_message_are_found_in_every_slot_also_above_a_lowered_limit in celery/test_limits.py.
    "a claim sees a copy in the first slot only": (
        "limits",
        (FINISH, "local locks = {unpack(KEYS, 6)}", "local locks = {KEYS[6]}"),
    ),
}

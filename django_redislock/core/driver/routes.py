"""The way of each call to its node in a Cluster, written once for threads and for asyncio.

The rules are those of the Cluster specification. A node that does not have the slot answers MOVED: the slot is noted,
and the call is sent again at once. While a slot moves, its owner answers ASK, and the next owner takes the call after
ASKING. A script whose keys are at both nodes is answered by TRYAGAIN. After TRYAGAIN and CLUSTERDOWN the call is
repeated, as for a server that cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from .effects import At, AtEach, Operation, Pipeline, ScriptBatch, ScriptCall, Subscribe, Unsubscribe
from .slot_table import Node, NotNow, SlotTable
from .slots import slot_of
from .wakeups import Waiter

MAX_REDIRECTIONS = 5
"""Redirections of one call before the call is repeated as for a server that cannot be reached."""


def route(table: SlotTable, call: ScriptCall | Pipeline, patience: float | None = None) -> Operation[Any]:
    """Carry out a call whose keys are in one slot at the node of the slot."""
    slot = slot_of(_first_key(call))
    node = table.known_owner(slot) or (yield from table.find_owner(slot, patience))
    sent: ScriptCall | Pipeline = call
    for _ in range(MAX_REDIRECTIONS):
        try:
            reply = yield At(node, sent, patience)
        except AskError as error:  # or MovedError
            node = table.redirect(error, node)
            sent = call if isinstance(error, MovedError) else _asking(call)
        except (TryAgainError, ClusterDownError) as error:
            table.outdated = table.outdated or isinstance(error, ClusterDownError)
            raise NotNow(str(error)) from error
        except (ConnectionError, TimeoutError):
            yield from table.note_failure(node, patience)
            raise
        else:
            node.reached = True
            if sent is call:
                return reply
            return reply[1] if isinstance(call, ScriptCall) else reply[1::2]
    raise NotNow(f"The nodes do not agree about the slot {slot}.")


def route_each(table: SlotTable, calls: tuple[ScriptCall, ...], patience: float | None = None) -> Operation[list[Any]]:
    """Carry out many calls, those to one node at once; the result has an error in place of each failed call."""
    by_node: dict[Node, list[int]] = {}
    for number, call in enumerate(calls):
        slot = slot_of(_first_key(call))
        node = table.known_owner(slot) or (yield from table.find_owner(slot, patience))
        by_node.setdefault(node, []).append(number)
    # Threads ask one node after the other: a node that did not answer lately keeps none of the others waiting.
    by_node = dict(sorted(by_node.items(), key=lambda part: part[0].failed))
    parts = tuple(
        At(node, ScriptBatch(tuple(calls[number] for number in numbers)), patience) for node, numbers in by_node.items()
    )
    results = yield AtEach(parts)
    replies: list[Any] = [None] * len(calls)
    for (node, numbers), result in zip(by_node.items(), results, strict=True):
        if isinstance(result, RedisError):
            yield from table.note_failure(node, patience)
            result = [result] * len(numbers)
        for number, reply in zip(numbers, result, strict=True):
            if isinstance(reply, (AskError, TryAgainError, ClusterDownError)):
                reply = yield from _route_again(table, calls[number], patience)
            replies[number] = reply
    return replies


def _route_again(table: SlotTable, call: ScriptCall, patience: float | None) -> Operation[Any]:
    try:
        return (yield from route(table, call, patience))
    except RedisError as failure:
        return failure


def route_commands(table: SlotTable, pipeline: Pipeline) -> Operation[list[Any]]:
    """Carry out plain commands, each at the node of its first key, those to one node at once."""
    commands = pipeline.commands
    slots = [slot_of(command[1]) for command in commands]
    if len(set(slots)) == 1:
        return (yield from route(table, pipeline))  # type: ignore[no-any-return]
    by_node: dict[Node, list[int]] = {}
    for number, slot in enumerate(slots):
        node = table.known_owner(slot) or (yield from table.find_owner(slot))
        by_node.setdefault(node, []).append(number)
    parts = tuple(At(node, Pipeline(tuple(commands[each] for each in numbers))) for node, numbers in by_node.items())
    results = yield AtEach(parts)
    replies: list[Any] = [None] * len(commands)
    result: Any = None
    try:
        for (node, numbers), result in zip(by_node.items(), results, strict=True):
            if isinstance(result, (AskError, TryAgainError, ClusterDownError)):
                result = []
                for number in numbers:
                    result += yield from route(table, Pipeline((commands[number],)))
            elif isinstance(result, RedisError):
                if isinstance(result, (ConnectionError, TimeoutError)):
                    yield from table.note_failure(node, None)
                raise result
            for number, reply in zip(numbers, result, strict=True):
                replies[number] = reply
        return replies
    finally:
        del result, results  # an error refers to this frame


def _first_key(call: ScriptCall | Pipeline) -> bytes:
    return call.keys[0] if isinstance(call, ScriptCall) else call.commands[0][1]


def _asking(call: ScriptCall | Pipeline) -> Pipeline:
    """Return the call for the next owner of a slot, which may not know the script."""
    if isinstance(call, Pipeline):
        commands = call.commands
    else:
        commands = ((b"EVAL", call.script.text, b"%d" % len(call.keys), *call.keys, *call.args),)
    return Pipeline(tuple(part for command in commands for part in ((b"ASKING",), command)))


def subscribe(table: SlotTable, effect: Subscribe) -> Operation[Waiter]:
    """Register a waiter at the node of its lock, and subscribe there; return the waiter."""
    node = yield from _subscribe_at(table, effect)
    waiter: Waiter = node[1]
    waiter.home = node[0]
    if effect.of is not None and effect.of != effect.lock:
        # It waits in another lock's room, but the scripts of its own lock look for subscribers at their own node.
        other, guest = yield from _subscribe_at(table, Subscribe(effect.of, effect.id + b"-"))
        yield At(other, Unsubscribe(guest))
    return waiter


def _subscribe_at(table: SlotTable, effect: Subscribe) -> Operation[tuple[Node, Waiter]]:
    slot = slot_of(effect.lock)
    node = table.known_owner(slot) or (yield from table.find_owner(slot))
    try:
        return node, (yield At(node, effect))
    except (ConnectionError, TimeoutError):
        yield from table.note_failure(node, None)
        raise


def home_of(table: SlotTable, waiter: Waiter, room_of: Callable[[Node], Any]) -> Node:
    """Return the node where the waiter is to wait: the owner of its slot, to which it moves if necessary.

    A group's waiter stays with its members. They are woken there all the same, because nodes pass messages on.
    """
    home: Node = waiter.home
    owner = table.known_owner(slot_of(waiter.lock))
    if owner is None or owner is home or waiter.group is not None or waiter.woken_members != ():
        return home
    room_of(home).unregister(waiter)
    room_of(owner).admit(waiter)
    waiter.home = owner
    return owner


class ClusterRoom:
    """The waiting rooms of all nodes."""

    def __init__(self, table: SlotTable, room_of: Callable[[Node], Any]) -> None:
        self._table = table
        self._room_of = room_of

    @property
    def open(self) -> bool:
        """Whether wake-ups arrive from every primary."""
        primaries = self._table.primaries
        return bool(primaries) and all(self._room_of(node).open for node in primaries)

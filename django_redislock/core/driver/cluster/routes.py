"""The way of each call to its node in a Cluster, written once for threads and for asyncio.

The rules are those of the Cluster specification. A node that does not have the slot answers MOVED: the slot is noted,
and the call is sent again at once. While a slot moves, its owner answers ASK, and the next owner takes the call after
ASKING. A script whose keys are at both nodes is answered by TRYAGAIN. After TRYAGAIN and CLUSTERDOWN the call is
repeated, as for a server that cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from ..effects import At, AtEach, Operation, Pipeline, ScriptBatch, ScriptCall, Subscribe, without_frames
from ..wakeups import Waiter
from .table import Node, NotNow, SlotTable, is_unanswered, no_owner

MAX_REDIRECTIONS = 5
"""Redirections of one call before the call is repeated as for a server that cannot be reached."""


def route(table: SlotTable, call: ScriptCall | Pipeline, patience: float | None = None) -> Operation[Any]:
    """Carry out a call whose keys are in one slot at the node of the slot."""
    slot = key_slot(_first_key(call))
    node = table.known_owner(slot) or (yield from table.find_owner(slot, patience))
    sent: ScriptCall | Pipeline = call
    for _ in range(MAX_REDIRECTIONS):
        try:
            reply = yield At(node, sent, patience)
        except AskError as error:  # or MovedError
            node = table.redirect(error, node)
            sent = call if isinstance(error, MovedError) else _asking(call)
            grants = isinstance(call, ScriptCall) and call.script.granted is not None
            if sent is not call and grants and node.min_replicas:  # behind ASKING no replica would confirm it
                raise NotNow(f"The slot {slot} is moving.") from error
        except (TryAgainError, ClusterDownError) as error:
            table.outdated = table.outdated or isinstance(error, ClusterDownError)
            raise NotNow(str(error)) from error
        except (ConnectionError, TimeoutError) as error:
            node.reached = node.reached or not is_unanswered(error)
            yield from table.note_failure([node], patience)
            raise
        else:
            node.reached = True
            if sent is call:
                return reply
            return reply[1] if isinstance(call, ScriptCall) else reply[1::2]
    raise NotNow(f"The nodes do not agree about the slot {slot}.")


def route_each(table: SlotTable, calls: tuple[ScriptCall, ...], patience: float | None = None) -> Operation[list[Any]]:
    """Carry out many calls, those to one node at once; the result has an error in place of each failed call."""

    def batch(numbers: list[int]) -> ScriptBatch:
        return ScriptBatch(tuple(calls[number] for number in numbers))

    replies = yield from _at_each_node(table, [call.keys[0] for call in calls], batch, patience)
    silence: Any = None
    for number, reply in enumerate(replies):
        if isinstance(reply, (AskError, TryAgainError, ClusterDownError)):
            # Many slots may have moved to one silent node. With its time for each of them, renewals that other nodes
            # had answered long before were noted after the expiry.
            replies[number] = silence or (yield from _route_again(table, calls[number], patience))
            silence = replies[number] if isinstance(replies[number], TimeoutError) else silence
    return replies


def _route_again(table: SlotTable, call: ScriptCall, patience: float | None) -> Operation[Any]:
    try:
        return (yield from route(table, call, patience))
    except RedisError as error:
        return without_frames(error)


def route_commands(table: SlotTable, pipeline: Pipeline, patience: float | None = None) -> Operation[list[Any]]:
    """Carry out plain commands, each at the node of its first key, those to one node at once."""
    commands = pipeline.commands
    if len({key_slot(command[1]) for command in commands}) == 1:
        return (yield from route(table, pipeline, patience))  # type: ignore[no-any-return]

    def batch(numbers: list[int]) -> Pipeline:
        return Pipeline(tuple(commands[number] for number in numbers))

    replies = yield from _at_each_node(table, [command[1] for command in commands], batch, patience)
    try:
        for number, reply in enumerate(replies):
            if isinstance(reply, (AskError, TryAgainError, ClusterDownError)):
                (replies[number],) = yield from route(table, Pipeline((commands[number],)), patience)
            elif isinstance(reply, RedisError):
                raise reply
        return replies
    finally:
        del reply, replies  # an error refers to this frame


def _at_each_node(
    table: SlotTable, keys: list[bytes], batch: Callable[[list[int]], ScriptBatch | Pipeline], patience: float | None
) -> Operation[list[Any]]:
    """Carry out the batch for the numbers of the keys that each node has; return the replies by number.

    The result has an error in place of each reply that failed.
    """
    slots = list(map(key_slot, keys))
    yield from table.refresh(slots, patience)
    replies: list[Any] = [None] * len(keys)
    by_node: dict[Node, list[int]] = {}
    for number, slot in enumerate(slots):
        node = table.last_owner(slot)
        if node is None:
            replies[number] = no_owner(slot)
        else:
            by_node.setdefault(node, []).append(number)
    # Threads ask one node after the other: a node that did not answer lately keeps none of the others waiting.
    by_node = dict(sorted(by_node.items(), key=lambda part: part[0].failed))
    results = yield AtEach(tuple(At(node, batch(numbers), patience) for node, numbers in by_node.items()))
    failed = []
    for (node, numbers), result in zip(by_node.items(), results, strict=True):
        each = [result] * len(numbers) if isinstance(result, RedisError) else result
        node.reached = node.reached or not all(map(is_unanswered, each))
        if any(isinstance(reply, (ConnectionError, TimeoutError)) for reply in each):
            failed.append(node)
        for number, reply in zip(numbers, each, strict=True):
            replies[number] = reply
    if failed:
        yield from table.note_failure(failed, patience)
    return replies


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
    slot = key_slot(effect.lock)
    node = table.known_owner(slot) or (yield from table.find_owner(slot))
    try:
        waiter: Waiter = yield At(node, effect)
    except (ConnectionError, TimeoutError):
        yield from table.note_failure([node], None)
        raise
    waiter.home = node
    return waiter


def home_of(table: SlotTable, waiter: Waiter, room_of: Callable[[Node], Any]) -> Node:
    """Return the node where the waiter is to wait: the owner of its slot, to which it moves if necessary."""
    home: Node = waiter.home
    owner = table.known_owner(key_slot(waiter.lock))
    if owner is None or owner is home:
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

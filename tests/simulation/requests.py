"""A request: it arrives, is executed and answered, or meets a fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError, NoScriptError, ResponseError, TimeoutError

from django_redislock.core.driver.effects import Pipeline, ScriptBatch, ScriptCall
from django_redislock.core.driver.replicated import Wait

if TYPE_CHECKING:
    from .world import Process

SOCKET_TIMEOUT = 5.0
FATES = ("refused", "unanswered", "late", "slow", "lost", "unknown")
"""refused: never executed, the connection breaks; unanswered: executed, the connection breaks; late: the connection
breaks, and it is executed afterwards; slow: executed after the patience is over; lost: never executed, and nobody says
so; unknown: the server has lost its scripts."""


def delay_of(chance: float) -> float:
    """Return how long a packet takes: a millisecond at most, or one time in ten up to 50."""
    return 0.0001 + 0.001 * chance if chance < 0.9 else 0.001 + 0.49 * (chance - 0.9)


def execute_soon(process: Process, effect: Any, answer: Callable[[Any], None], back: float) -> None:
    """Execute a request that meets no fault; the server may have become silent meanwhile."""
    world, host = process.world, process.host
    if host.silent_until > world.time or host.down_until > world.time:
        Trial(process, effect, answer, SOCKET_TIMEOUT, "well", 0.0, back, 0.0)
    else:
        world.at(world.time + back, partial(process._happen, partial(answer, execute(process, effect))))


def execute(process: Process, effect: Any) -> Any:
    """Execute scripts or commands now, and return the reply or the error."""
    server, executed = process.host.server, process.world.executed
    if type(effect) is ScriptCall:
        before = server.peek(effect.keys[0])  # an expired value would seem to be released by a repeated reset
        try:
            reply = server.run(effect.script.text, effect.keys, effect.args)
        except (ResponseError, ConnectionError) as error:
            reply = error
        executed(process, effect, before, reply)
        return reply
    if isinstance(effect, ScriptBatch):
        return [execute(process, call) for call in effect.calls]
    if isinstance(effect, Wait):
        return process.host.wait(effect)
    assert isinstance(effect, Pipeline)
    replies: list[Any] = []
    for command in effect.commands:
        before = server.peek(command[-1] if len(command) == 1 else command[1])
        try:
            replies.append(server.command(*command))
        except ResponseError as error:
            return error
        executed(process, command, before, replies[-1])
    return replies


class Trial:
    """A request that meets a fault, or a server that does not answer at once."""

    def __init__(
        self,
        process: Process,
        effect: Any,
        answer: Callable[[Any], None],
        patience: float,
        fate: str,
        there: float,
        back: float,
        extra: float,
    ) -> None:
        self.process, self.effect, self.answer, self.fate, self.back = process, effect, answer, fate, back
        self.over = False
        world = process.world
        if fate == "slow":
            there = patience + 2 * extra
        elif fate == "late":
            there = 3 * extra
        elif fate == "unknown" and (type(effect) is not ScriptCall or b"\r\nEVAL\r\n" in effect.request[:24]):
            self.fate = fate = "well"
        self.arrives = max(world.time + there, process.host.silent_until)
        process.trouble(max(patience, self.arrives - world.time))
        if fate not in ("lost", "refused", "unknown"):
            world.at(self.arrives, self.execute)
        if fate == "unknown":
            process.soon(back, partial(self.finish, NoScriptError("NOSCRIPT No matching script.")))
        broken = back if fate in ("refused", "late") else self.arrives + back - world.time
        if fate in ("refused", "unanswered", "late") and broken < patience:
            process.soon(broken, partial(self.finish, ConnectionError(f"the connection broke ({fate})")))
        elif fate != "unknown":
            process.soon(patience, self.give_up)

    def execute(self) -> None:
        if self.process.host.down_until > self.process.world.time:
            self.process.soon(self.back, partial(self.finish, ConnectionError("the server is down")))
            return
        reply = execute(self.process, self.effect)
        if self.fate in ("well", "slow"):
            self.process.soon(self.back, partial(self.finish, reply))

    def finish(self, result: Any) -> None:
        if not self.over:
            self.over = True
            self.process.trouble()
            self.answer(result)

    def give_up(self) -> None:
        """Let the answer be a time-out; the request may still be executed."""
        self.finish(TimeoutError("no answer"))

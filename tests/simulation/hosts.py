"""Worlds with several servers: each has its own data, clock and faults, and each process has a link to each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from django_redislock.core.lease import cause_call, causes_of
from django_redislock.core.watchdog import patience_of

from .driver import Room, SimulatedWatchdog, Thread
from .model_server import ModelServer
from .world import EPOCH, SETTLED, SOCKET_TIMEOUT, Fault, Plan, Process, World


class Host:
    """One of several servers, and what goes wrong with it."""

    def __init__(self, world: World, number: int, rate: float) -> None:
        self.world = world
        self.number = number
        self.server = ModelServer(lambda: int((EPOCH + world.time * rate) * 1_000_000))
        self.silent_until = 0.0
        self.down_until = 0.0
        self.troubled = 0.0
        """Until then something is wrong with it."""
        self.links: list[Link] = []

    def __repr__(self) -> str:
        return f"server {self.number}"

    def silence(self, seconds: float) -> None:
        """Answer nobody for so long."""
        self.world.tell(self, f"silent for {seconds:.3f} s")
        self.silent_until = self.world.time + seconds
        self.trouble(seconds)

    def restart(self, seconds: float, state: tuple[dict[bytes, Any], dict[bytes, int]] | None = None) -> None:
        """Be away for so long, and come back with the same data, or with others."""
        self.world.tell(self, f"away for {seconds:.3f} s{'' if state is None else ', with other data'}")
        self.down_until = max(self.down_until, self.world.time + seconds)  # one that lost its data stays away
        self.trouble(seconds)
        if state is not None:
            self.server.data, self.server.ends = state
        self.break_links()

    def break_links(self) -> None:
        """Break the subscriptions of all processes."""
        for link in self.links:
            link.room.cut()
            link.soon(0.01, link.room.broken)

    def trouble(self, seconds: float) -> None:
        """Note that something is wrong with it for so long."""
        self.troubled = max(self.troubled, self.world.time + seconds + SETTLED)
        self.world.note_fault(self, self.troubled, "trouble")


class Machine(Process):
    """A process with a link to each server."""

    links: list[Link]

    def kill(self) -> None:
        super().kill()
        for link in self.links:
            link.room.cut()


class LinkWatchdog(SimulatedWatchdog):
    """A watchdog that asks the server for the cause of a loss, because what becomes of a part depends on it."""

    def _lost(self, lease: Any) -> None:
        in_time = [self._process.clock() < lease.deadline]

        def answered(replies: Any) -> None:
            with self._process.world.run_by(Thread(self._process, "watchdog", None)):
                found = None if isinstance(replies, RedisError) else replies
                lease.lose(causes_of([lease], in_time, found)[0])

        self._process.request(cause_call([lease]), answered, patience_of(lease))


class Link(Process):
    """What a process has of one of several servers: its requests, its subscription, its watchdog.

    It lives as its process does.
    """

    answered_in: float | None = None

    def __init__(self, owner: Machine, host: Host) -> None:
        self.views = {}
        self.world = owner.world
        self.owner = owner
        self.host = host
        self.place = host
        self.number = 16 * (host.number + 1) + owner.number
        self.name = f"{owner} at {host}"
        self.random = random.Random(self.world.plan.seed * 128 + self.number)
        self.requests = 0
        self.answer = None
        self.troubled = 0.0
        self.timeout = SOCKET_TIMEOUT
        self.room = Room(self)
        self.watchdog = LinkWatchdog(self)

    alive = property(lambda self: self.owner.alive)  # type: ignore[assignment]
    frozen = property(lambda self: self.owner.frozen)  # type: ignore[assignment]
    freezes = property(lambda self: self.owner.freezes)  # type: ignore[assignment]
    offset = property(lambda self: self.owner.offset)  # type: ignore[assignment]

    def freeze(self) -> None:
        self.owner.freeze()

    def thaw(self) -> None:
        self.owner.thaw()

    def _happen(self, event: Callable[[], None]) -> None:
        self.owner._happen(event)

    @property
    def well(self) -> float:
        """Since when nothing has been wrong between the process and the server; later than now: something is."""
        return max(self.troubled, self.owner.troubled, self.host.troubled)


class WideWorld(World):
    """A world with several servers. The process of a fault of a server is the server's number."""

    single = False

    def __init__(self, plan: Plan, executed: Callable[[Process, Any, Any, Any], None]) -> None:
        rates = plan.options["rates"]
        self.hosts = [Host(self, number, rate) for number, rate in enumerate(rates)]
        super().__init__(plan, executed)
        for machine in self.processes:
            machine.links = [Link(machine, host) for host in self.hosts]  # type: ignore[attr-defined]
        for host in self.hosts:
            host.links = [machine.links[host.number] for machine in self.processes]  # type: ignore[attr-defined]

    def new_process(self, number: int) -> Process:
        return Machine(self, number)

    @property
    def servers(self) -> list[ModelServer]:
        return [host.server for host in self.hosts]

    @property
    def senders(self) -> list[Process]:
        return [link for host in self.hosts for link in host.links]

    def _cut(self, fault: Fault) -> None:
        """Break the subscription of one process at one server; its number counts through both."""
        link = self.senders[fault.process % len(self.senders)]
        link.room.cut()
        link.soon(fault.seconds, link.room.broken)

    def _silence(self, fault: Fault) -> None:
        self.hosts[fault.process].silence(fault.seconds)

    def _restart(self, fault: Fault) -> None:
        self.hosts[fault.process].restart(fault.seconds)

    def _loss(self, fault: Fault) -> None:
        self.hosts[fault.process].restart(fault.seconds, ({}, {}))

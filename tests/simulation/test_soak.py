"""Eight real processes take locks and slots and compute values while everything fails: the promises on real servers.

For some seconds: one half on one server that restarts, the other half on a primary and a replica, which Sentinels fail
over. For ten minutes with REDISLOCK_SOAK_SECONDS=600 and pytest's ``-o faulthandler_timeout=900``.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from django_redislock.core import held_locks
from django_redislock.core.clock import monotonic
from tests.histories.check import judge
from tests.support import BUSY, Deployment, Proxy, PythonProcess, RedisServer, wait_until
from tests.support.cache_programs import cache_at
from tests.support.failovers import APP, PASSWORD
from tests.support.soak import LIMIT, SEMAPHORE, UNCONFIRMED, process_name, soak

pytestmark = pytest.mark.processes

SECONDS = float(os.environ.get("REDISLOCK_SOAK_SECONDS", "20"))
PROCESSES = 8
SOCKET_TIMEOUT = 2.0
SHORTEST = 5.0
"""Seconds for which it storms at least, however long the start took."""
MAX_LAG = 2
"""Seconds of silence of its replica that a primary bears; then it refuses to write."""
UNREPLICATED = MAX_LAG + 1.0
"""Seconds before a failover within which a write may be lost: the server counts whole seconds."""
LONGEST_EXPIRE = 2.0
CONSEQUENCES = SOCKET_TIMEOUT + LONGEST_EXPIRE + 2.0
"""Seconds after a fault until which locks that nobody holds may be in the way."""
Windows = list[tuple[float, float]]


class Storm:
    """The processes, their proxies and their server, and what goes wrong with them.

    `server` has the origin of the values. It also has the locks and the values, unless there is a deployment.
    """

    def __init__(
        self,
        server: RedisServer,
        deployment: Deployment | None,
        proxies: list[Proxy],
        ledger: Path,
        stack: ExitStack,
        library: str = "",
    ) -> None:
        self.library = library
        self.server, self.deployment, self.proxies, self.ledger, self.stack = server, deployment, proxies, ledger, stack
        self.primary = server if deployment is None else deployment.primary
        self.seen = monotonic()
        """When it was seen last to be the primary."""
        self.failovers: Windows = []
        """From when to when a failover may have lost what the replica had not confirmed."""
        self.chance = random.Random()
        self.started = 0
        self.processes = [self.start() for _ in range(PROCESSES)]
        self.faults: dict[str, int] = defaultdict(int)
        self.notes: list[dict[str, Any]] = []
        """The faults, as lines of the history."""

    def start(self) -> PythonProcess:
        """Start a process."""
        self.started += 1
        proxy = self.proxies[self.started % len(self.proxies)]
        url, confirmed = proxy.url, int(self.deployment is not None)
        if self.deployment is not None:
            url = url.replace("//", f"//{APP}:{PASSWORD}@")
        process = PythonProcess(soak, url, self.origin, str(self.ledger), self.started, confirmed, self.library)
        self.stack.callback(process.close)
        return process

    @property
    def origin(self) -> str:
        """The URL of the values' origin."""
        return self.server.url_of_db(1)

    def blow(self) -> None:
        """Let something go wrong, and let it be over."""
        faults: list[Callable[[], None]] = [self.kill, self.freeze, self.freeze, self.drop, self.delay, self.stall]
        of_servers = [self.restart, self.silence] if self.deployment is None else [self.fail_over, self.fail_over]
        fault = self.chance.choice([*faults, self.swallow, self.cut, *of_servers]) if self.faults else of_servers[0]
        self.faults[fault.__name__] += 1
        began = monotonic()
        fault()
        self.follow()
        self.note_fault(fault.__name__, began, monotonic() + CONSEQUENCES)

    def note_fault(self, what: str, at: float, until: float, who: str = "", loses: Iterable[str] = ()) -> None:
        """Note a line of the history; `loses`: the locks that may be lost."""
        self.notes.append({"event": "fault", "what": what, "who": who, "at": at, "until": until, "loses": [*loses]})

    def histories(self) -> list[list[dict[str, Any]]]:
        """Return what was seen of the locks and of the semaphore, each with the promises in the first line."""
        lines = [json.loads(line) for line in self.ledger.read_text().splitlines()]
        names = {line["name"] for line in lines if "name" in line}
        unsafe = {name for name in names if name == UNCONFIRMED or name.startswith("cache:constant")}
        for since, until in self.failovers:
            self.note_fault("failover", since - UNREPLICATED, until + LONGEST_EXPIRE, loses=sorted(unsafe))
        source = self.library or "django-redislock"
        head = {"event": "history", "source": source, "slack": BUSY, "free": 2.0, "late": 2 * SOCKET_TIMEOUT + BUSY}
        of_locks = head | {"history": 0, "holders": 1, "fences": not self.library}
        of_slots = head | {"history": 1, "holders": LIMIT, "fences": False}  # two may begin in either order
        return [
            [of_locks, *self.notes, *(line for line in lines if line.get("name") != SEMAPHORE)],
            [of_slots, *self.notes, *(line for line in lines if line.get("name") == SEMAPHORE)],
        ]

    def kill(self) -> None:
        number = self.chance.randrange(PROCESSES)
        self.processes[number].kill()
        self.processes[number] = self.start()

    def freeze(self) -> None:
        process, began = self.chance.choice(self.processes), monotonic()
        process.pause()
        time.sleep(self.chance.choice([0.2, 0.7, 2.5]))
        process.resume()
        self.note_fault("frozen", began, monotonic(), process_name(process.pid))

    def drop(self) -> None:
        self.chance.choice(self.proxies).drop_next_reply(self.chance.randint(1, 5))

    def delay(self) -> None:
        proxy = self.chance.choice(self.proxies)
        proxy.delay_replies(self.chance.choice([0.01, 0.1, 0.4]))
        time.sleep(1)
        proxy.delay_replies(0)

    def stall(self) -> None:
        self._for_a_while(Proxy.stall)

    def swallow(self) -> None:
        self._for_a_while(Proxy.black_hole)

    def _for_a_while(self, fault: Callable[[Proxy], None]) -> None:
        proxy = self.chance.choice(self.proxies)
        fault(proxy)
        time.sleep(self.chance.choice([0.2, 0.7, 2.5]))
        proxy.heal()

    def cut(self) -> None:
        self.chance.choice(self.proxies).cut()

    def restart(self) -> None:
        """Kill the server, and start it with what it had written."""
        self.server.kill()
        self.server.start()

    def silence(self) -> None:
        self.server.pause()
        time.sleep(self.chance.choice([0.2, 0.7, 1.5]))
        self.server.resume()

    def fail_over(self) -> None:
        """Let a replica be promoted, and bring the former primary back as its replica."""
        assert self.deployment is not None
        deployment, began = self.deployment, self.seen
        how = self.chance.choice([deployment.kill, deployment.hang, deployment.switch, deployment.cut_off])
        self.faults[f"{how.__name__} of the primary"] += 1
        former = how()
        deployment.wait_for_another(former)
        self.follow()
        time.sleep(self.chance.choice([0.0, 0.5, 2.0]))
        deployment.heal(former)
        self.failovers.append((began, monotonic()))

    def follow(self) -> None:
        """Lead new connections to the primary, perhaps the open ones, too: a busy machine may fail over by itself."""
        primary = self.primary if self.deployment is None else self.deployment.primary
        if primary is not self.primary:
            self.failovers.append((self.seen, monotonic()))
            for proxy in self.proxies:
                self.chance.choice([proxy.lead_to, proxy.lead_new_to])(primary.url)
        self.primary, self.seen = primary, monotonic()

    def end(self) -> None:
        """Let every process come to its end."""
        for process in self.processes:
            wait_until(lambda process=process: process.lines, 60, "the process works")
            process.send()
        for process in self.processes:
            process.wait_for(timeout=60, event="ended")


@contextmanager
def storm(tmp_path: Path, failovers: bool, library: str = "") -> Iterator[Storm]:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(appendonly="yes", appendfsync="always"))
        safe = {"min_replicas_to_write": "1", "min_replicas_max_lag": str(MAX_LAG)}
        deployment = stack.enter_context(Deployment(**safe)) if failovers else None
        target = server.url if deployment is None else deployment.primary.url
        proxies = [stack.enter_context(Proxy(target)) for _ in range(4)]
        yield Storm(server, deployment, proxies, tmp_path / "ledger", stack, library)


@pytest.mark.long
@pytest.mark.parametrize("failovers", [False, True], ids=["restarts", "failovers"])
def test_in_a_storm_nothing_overlaps_and_nothing_stale_is_stored(tmp_path, failovers):
    """What a replica confirmed survives each failover; of the rest, what docs/safety.rst tells may be lost there."""
    began = time.monotonic()
    with storm(tmp_path, failovers) as world:
        for process in world.processes:
            process.wait_for(event="works")
        end = max(began + SECONDS / 2, time.monotonic() + SHORTEST)
        while time.monotonic() < end:
            world.blow()
            time.sleep(world.chance.choice([0.0, 0.1, 0.3]))
        # A failover may have taken all the time.
        for event in ("believed", f'{SEMAPHORE}", "released', "cache:constant", "changed"):
            seen = f'"{event}'
            wait_until(lambda seen=seen: world.ledger.read_text().count(seen) > 5, message=seen)
        world.end()
        histories = world.histories()
        by_event: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in (line for lines in histories for line in lines):
            by_event[line["event"]].append(line)
        counts = {event: len(found) for event, found in by_event.items()}
        print(f"{SECONDS / 2:.0f} s: {counts}; faults: {dict(world.faults)}")
        assert by_event["crashed"] == []
        assert min(counts["believed"], counts["changed"]) > 5
        assert [wrong for lines in histories for wrong in judge(lines[0], lines[1:])] == []
        slots = [line["fence"] for line in by_event["believed"] if line["name"] == SEMAPHORE]
        assert len(set(slots)) == len(slots) > 5
        with redis.Redis.from_url(world.primary.url) as client:
            wait_until(lambda: not list(held_locks(client)), 15, "no lock is left")
            assert [key for key in client.scan_iter() if client.ttl(key) == -1] == []
        assert stale(by_event, world) == []


def within(time: float, windows: Windows, before: float, after: float) -> bool:
    """Return whether the time is within one of the windows, or so many seconds before or after it."""
    return any(since - before <= time <= until + after for since, until in windows)


def stale(by_event: dict[str, list[dict[str, Any]]], world: Storm) -> list[Any]:
    """Return values older than their origin, though each change was carried through, and none near a failover."""
    begun = [line["key"] for line in by_event["changes"]]
    carried = [line["key"] for line in by_event["changed"]]
    lost = {
        line["key"] for line in by_event["changed"] if within(line["at"], world.failovers, UNREPLICATED, LONGEST_EXPIRE)
    }
    cache = cache_at(world.primary.url)
    with redis.Redis.from_url(world.origin) as origin:
        found = {name: (cache.get(name), int(origin.get(name) or 0)) for name in set(carried) - lost}
    return [
        (name, value, version)
        for name, (value, version) in found.items()
        if begun.count(name) == carried.count(name) and value is not None and value != version
    ]

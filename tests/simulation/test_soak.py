"""Eight real processes that take locks and compute values while everything fails: what the simulation promises, on a real server.

For some seconds; for ten minutes with REDISLOCK_SOAK_SECONDS=600 and pytest's ``-o faulthandler_timeout=900``.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from django_redislock.core import held_locks
from django_redislock.core.clock import monotonic
from tests.support import BUSY, Proxy, PythonProcess, RedisServer, wait_until
from tests.support.cache_programs import cache_at
from tests.support.soak import soak

pytestmark = pytest.mark.processes

SECONDS = float(os.environ.get("REDISLOCK_SOAK_SECONDS", "20"))
PROCESSES = 8
SOCKET_TIMEOUT = 2.0


class Storm:
    """The processes, their proxies and their server, and what goes wrong with them."""

    def __init__(self, server: RedisServer, proxies: list[Proxy], ledger: Path, stack: ExitStack) -> None:
        self.server, self.proxies, self.ledger, self.stack = server, proxies, ledger, stack
        self.chance = random.Random()
        self.started = 0
        self.processes = [self.start() for _ in range(PROCESSES)]
        self.faults: dict[str, int] = defaultdict(int)
        self.frozen: list[tuple[int, float, float]] = []
        self.down: list[tuple[float, float]] = []

    def start(self) -> PythonProcess:
        """Start a process."""
        self.started += 1
        proxy = self.proxies[self.started % len(self.proxies)]
        process = PythonProcess(soak, proxy.url, self.server.url_of_db(1), str(self.ledger), self.started)
        self.stack.callback(process.close)
        return process

    def blow(self) -> None:
        """Let something go wrong, and let it be over."""
        faults: list[Callable[[], None]] = [self.kill, self.freeze, self.freeze, self.drop, self.delay, self.stall]
        fault = self.chance.choice([*faults, self.swallow, self.cut, self.restart, self.silence])
        self.faults[fault.__name__] += 1
        fault()

    def kill(self) -> None:
        number = self.chance.randrange(PROCESSES)
        self.processes[number].kill()
        self.processes[number] = self.start()

    def freeze(self) -> None:
        process, began = self.chance.choice(self.processes), monotonic()
        process.pause()
        time.sleep(self.chance.choice([0.2, 0.7, 2.5]))
        process.resume()
        self.frozen.append((process.pid, began, monotonic()))

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
        began = monotonic()
        self.server.kill()
        self.server.start()
        self.down.append((began, monotonic()))

    def silence(self) -> None:
        began = monotonic()
        self.server.pause()
        time.sleep(self.chance.choice([0.2, 0.7, 1.5]))
        self.server.resume()
        self.down.append((began, monotonic()))

    def end(self) -> None:
        """Let every process come to its end."""
        for process in self.processes:
            wait_until(lambda process=process: process.lines, 60, "the process works")
            process.send()
        for process in self.processes:
            process.wait_for(timeout=60, event="ended")


@contextmanager
def storm(tmp_path: Path) -> Iterator[Storm]:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(appendonly="yes", appendfsync="always"))
        proxies = [stack.enter_context(Proxy(server.url)) for _ in range(4)]
        yield Storm(server, proxies, tmp_path / "ledger", stack)


def test_in_a_storm_nothing_overlaps_and_nothing_stale_is_stored(tmp_path):
    with storm(tmp_path) as world:
        for process in world.processes:
            process.wait_for(event="works")
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            world.blow()
            time.sleep(world.chance.choice([0.0, 0.1, 0.3]))
        world.end()
        lines = [json.loads(line) for line in world.ledger.read_text().splitlines()]
        by_event: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in lines:
            by_event[line["event"]].append(line)
        counts = {event: len(found) for event, found in by_event.items()}
        print(f"{SECONDS:.0f} s: {counts}; faults: {dict(world.faults)}")
        assert by_event["crashed"] == []
        assert min(counts["held"], counts["computed"], counts["changed"]) > 5
        assert overlaps(by_event["held"]) == []
        constant = [line for line in by_event["computed"] if line["name"].startswith("constant")]
        assert overlaps(constant) == []
        assert late(by_event["asked"], world.frozen) == []
        with world.server.client() as client:
            wait_until(lambda: not list(held_locks(client)), 15, "no lock is left")
            assert [key for key in client.scan_iter() if client.ttl(key) == -1] == []
        assert stale(by_event, world) == []


def overlaps(lines: list[dict[str, Any]]) -> list[Any]:
    """Return what was held or computed at once, and fences that did not grow in the order of beginning."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by_name[line["name"]].append(line)
    wrong: list[Any] = []
    for held in by_name.values():
        held.sort(key=lambda line: line["began"])
        for first, second in itertools.pairwise(held):
            if second["began"] <= first["ended"] or second["fence"] <= first["fence"]:
                wrong.append((first, second))
    return wrong


def late(lines: list[dict[str, Any]], frozen: list[tuple[int, float, float]]) -> list[Any]:
    """Return the acquisitions that came back too late, though their process was not frozen meanwhile."""
    wrong = []
    for line in lines:
        if line["took"] > line["timeout"] + 2 * SOCKET_TIMEOUT + BUSY:
            began = line["at"] - line["took"]
            if not any(pid == line["pid"] and since < line["at"] and until > began for pid, since, until in frozen):
                wrong.append(line)
    return wrong


def stale(by_event: dict[str, list[dict[str, Any]]], world: Storm) -> list[Any]:
    """Return the values that are older than their origin, though every change of them was carried through."""
    begun = [line["name"] for line in by_event["changes"]]
    carried = [line["name"] for line in by_event["changed"]]
    cache = cache_at(world.server.url)
    with redis.Redis.from_url(world.server.url_of_db(1)) as origin:
        found = {name: (cache.get(name), int(origin.get(name) or 0)) for name in set(carried)}
    return [
        (name, value, version)
        for name, (value, version) in found.items()
        if begun.count(name) == carried.count(name) and value is not None and value != version
    ]

"""What do one, two and three primaries of a Cluster carry, beside one server: cycles a second, and CPU for a cycle?"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from contextlib import ExitStack
from itertools import cycle
from typing import Any, NamedTuple

import redis
from common import LIFE, table

SECONDS, ROUNDS, PROCESSES, LOCKS, TASKS, WAKEUPS = 2.0, 3, 4, 200, 25, 20_000
FORK = multiprocessing.get_context("fork")


class Deployment(NamedTuple):
    """Servers that carry the locks together."""

    name: str
    url: str
    primaries: list[redis.Redis]

    def cpu(self) -> list[float]:
        """Return the CPU seconds that each primary has used so far."""
        infos = [primary.info("cpu") for primary in self.primaries]
        return [info["used_cpu_user"] + info["used_cpu_sys"] for info in infos]


class Round(NamedTuple):
    """What one deployment did in one round."""

    per_second: float
    busiest: float
    """Microseconds of the primary that worked most, for one cycle of any of them."""
    servers: float
    clients: float


def by_thread(url: str, names: list[str], until: Any) -> int:
    """Acquire and release locks in turn; return how often."""
    from django_redislock.core import Lock
    from django_redislock.server_url import client_from_url

    client, count = client_from_url(url), 0
    locks = [Lock(client, name, expire=LIFE) for name in names]
    for lock in locks:
        with lock:
            pass
    end = until()
    for lock in cycle(locks):
        if time.monotonic() >= end:
            return count
        lock.acquire()
        lock.release()
        count += 1
    return count


def by_tasks(url: str, names: list[str], until: Any) -> int:
    """Do as `by_thread` in many tasks of one event loop, whose commands share connections."""
    from django_redislock.core import AsyncLock
    from django_redislock.server_url import client_from_url

    async def work(locks: list[AsyncLock], end: float) -> int:
        count = 0
        for lock in cycle(locks):
            if time.monotonic() >= end:
                break
            await lock.acquire()
            await lock.release()
            count += 1
        return count

    async def main() -> int:
        client = client_from_url(url)
        locks = [AsyncLock(client, name, expire=LIFE) for name in names]
        for lock in locks:
            async with lock:
                pass
        end = until()
        return sum(await asyncio.gather(*[work(locks[number::TASKS], end) for number in range(TASKS)]))

    return asyncio.run(main())


def worker(kind: Any, url: str, number: int, ready: Any, go: Any, results: Any) -> None:
    began = 0.0

    def until() -> float:
        nonlocal began
        ready.release()
        go.wait()
        began = time.process_time()
        return time.monotonic() + SECONDS

    count = kind(url, [f"{number}:{each}" for each in range(LOCKS)], until)
    results.put((count, time.process_time() - began))


def measure(kind: Any, deployment: Deployment) -> Round:
    """Let all processes work on the deployment for some seconds."""
    ready, go, results = FORK.Semaphore(0), FORK.Event(), FORK.SimpleQueue()
    workers = [
        FORK.Process(target=worker, args=(kind, deployment.url, number, ready, go, results))
        for number in range(PROCESSES)
    ]
    for process in workers:
        process.start()
    for _ in workers:
        ready.acquire()
    before = deployment.cpu()
    go.set()
    done = [results.get() for _ in workers]
    used = [b - a for a, b in zip(before, deployment.cpu(), strict=True)]
    for process in workers:
        process.join()
    cycles = sum(count for count, _ in done) or 1
    clients = sum(seconds for _, seconds in done)
    return Round(cycles / SECONDS, *(seconds / cycles * 1e6 for seconds in (max(used), sum(used), clients)))


def wakeups() -> None:
    """Print the CPU that all primaries together spend on a wake-up, by PUBLISH and by SPUBLISH (from Redis 7 on)."""
    from redis.crc import key_slot

    from tests.support import Cluster

    rows = []
    for primaries in (1, 3, 6):
        with Cluster(primaries=primaries) as nodes, ExitStack() as stack:
            clients = [stack.enter_context(node.client(protocol=2)) for node in nodes.nodes]
            names = (f"{{{number}}}:wake" for number in range(1000))
            channel = next(name for name in names if nodes.owner_of(key_slot(name.encode())) is nodes.nodes[0])
            all_nodes, row = Deployment("", "", clients), [primaries]
            for publish, subscribe in (("PUBLISH", "SUBSCRIBE"), ("SPUBLISH", "SSUBSCRIBE")):
                listener = clients[0].connection_pool.get_connection()
                listener.send_command(subscribe, channel)
                listener.read_response()
                before = sum(all_nodes.cpu())
                time.sleep(1)
                idle = sum(all_nodes.cpu()) - before
                began, before = time.monotonic(), sum(all_nodes.cpu())
                for _ in range(WAKEUPS // 1000):
                    pipeline = clients[0].pipeline(transaction=False)
                    for _ in range(1000):
                        pipeline.eval(f"return redis.call('{publish}', KEYS[1], 'id')", 1, channel)
                    pipeline.execute()
                    for _ in range(1000):
                        listener.read_response()
                time.sleep(0.3)  # the others have heard it, too
                spent = sum(all_nodes.cpu()) - before - idle * (time.monotonic() - began)
                row.append(f"{spent / WAKEUPS * 1e6:.1f}")
                listener.disconnect()
            rows.append(row)
    table("A wake-up: CPU of all primaries together", ["primaries", "PUBLISH, us", "SPUBLISH, us"], rows)


def main() -> None:
    from tests.support import Cluster, RedisServer

    kinds = {"threads": by_thread, f"{TASKS} tasks each": by_tasks}
    rounds: dict[tuple[str, str], list[Round]] = {}
    with ExitStack() as stack:
        one = stack.enter_context(RedisServer())
        deployments = [Deployment("one server", one.url, [stack.enter_context(one.client())])]
        for primaries in (1, 2, 3):
            nodes = stack.enter_context(Cluster(primaries=primaries)).nodes
            url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
            clients = [stack.enter_context(node.client()) for node in nodes]
            deployments.append(Deployment(f"Cluster of {primaries}", url, clients))
        for _ in range(ROUNDS):
            for deployment in random.sample(deployments, len(deployments)):
                for name, kind in kinds.items():
                    rounds.setdefault((name, deployment.name), []).append(measure(kind, deployment))
    rows = []
    for name in kinds:
        for deployment in deployments:
            found = Round(*map(statistics.median, zip(*rounds[name, deployment.name], strict=True)))
            rows.append(
                [
                    f"{deployment.name}, {name}",
                    f"{found.per_second:.0f}",
                    f"{found.servers:.1f}",
                    f"{found.busiest:.1f}",
                    f"{1e6 / found.busiest:.0f}" if found.busiest else "",
                    f"{found.clients:.1f}",
                ]
            )
    head = [
        "",
        "cycles/s here",
        "servers us/cycle",
        "busiest primary",
        "cycles/s with enough cores",
        "clients us/cycle",
    ]
    table(f"{PROCESSES} processes acquire and release {LOCKS} locks each", head, rows)
    wakeups()


if __name__ == "__main__":
    main()

"""What do many keys, stale values and misses cost?

Each is measured beside what the base class does, by turns: CPU time of this process, and of the server.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import redis
from cache_hit import configure
from cold_key import FORK, delayed
from common import server, table

ROUNDS = 9
BACKENDS = {
    "django-redis": ("django-redis", "django-redislock on django-redis"),
    "Django": ("Django", "django-redislock on Django's"),
}


def never(keys: Any = None) -> Any:
    raise AssertionError(f"{keys} should be there")


def server_seconds(client: redis.Redis) -> float:
    info = client.info("cpu")
    return info["used_cpu_user"] + info["used_cpu_sys"]


def ratios(
    client: redis.Redis, base: Callable[[], Any], ours: Callable[[], Any], calls: int, rounds: int = ROUNDS
) -> tuple[str, str, str]:
    """Return how often ours takes the base's CPU time, here and in the server, and the base's milliseconds here."""
    here, there, times = [], [], []
    for _ in range(rounds):
        spent = []
        for call in (base, ours):
            server_began, began = server_seconds(client), time.process_time()
            for _ in range(calls):
                call()
            spent.append((time.process_time() - began, server_seconds(client) - server_began))
        here.append(spent[1][0] / spent[0][0])
        there.append(spent[1][1] / max(spent[0][1], 1e-6))
        times.append(spent[0][0] / calls * 1000)
    return f"{statistics.median(here):.2f}", f"{statistics.median(there):.2f}", f"{statistics.median(times):.3f}"


def many(client: redis.Redis, caches: Any) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, (base, ours) in BACKENDS.items():
        for count in (10, 100, 1000):
            keys = [f"many:{number}" for number in range(count)]
            caches[base].set_many({key: {"key": key} for key in keys}, 3600)
            get, get_or_set = caches[base].get_many, caches[ours].get_or_set_many
            row = ratios(client, partial(get, keys), partial(get_or_set, keys, never), 2000 // count)
            rows.append([f"{count} keys that are there, to {name}'s get_many", *row])
    base, ours = (caches[name] for name in BACKENDS["django-redis"])
    keys = [f"large:{number}" for number in range(4000)]
    for key in keys:
        base.set(key, os.urandom(20_000), 3600)

    async def asynchronous() -> Any:
        return await ours.aget_or_set_many(keys, never)

    for how, call in (
        ("", lambda: ours.get_or_set_many(keys, never)),
        (", async", lambda: asyncio.run(asynchronous())),
    ):
        row = ratios(client, lambda: base.get_many(keys), call, 1, 5)
        rows.append([f"4,000 values of 20 KB that are there{how}", *row])
    client.flushdb()
    return rows


def stale(client: redis.Redis, caches: Any) -> list[list[object]]:
    from django_redislock.cache.lease import single_flight
    from django_redislock.core import Lock

    base, ours = (caches[name] for name in BACKENDS["django-redis"])
    rows: list[list[object]] = []
    for size, calls in ((1000, 400), (100_000, 200), (20_000_000, 5)):
        base.set("stale", os.urandom(size), 300)

        def hit(asks: bool) -> Any:
            if asks:  # as in a process that does not know yet
                single_flight._paused.clear()
            return ours.get_or_set("stale", never, 60, stale=600)

        with Lock(client, "cache::1:stale", expire=600):
            for what, asks in (("", False), (", the first of a process", True)):
                row = ratios(client, lambda: base.get("stale"), lambda asks=asks: hit(asks), calls, 5)
                rows.append([f"a stale hit of {size:,} bytes{what}", *row])
    return rows


def misses(client: redis.Redis, caches: Any) -> list[list[object]]:
    rows: list[list[object]] = []
    numbers = iter(range(10**9))
    for name, (base, ours) in BACKENDS.items():

        def miss(cache: Any) -> Any:
            return cache.get_or_set(f"miss:{next(numbers)}", lambda: 1, 60)

        miss(caches[ours])
        row = ratios(client, lambda base=base: miss(caches[base]), lambda ours=ours: miss(caches[ours]), 200)
        rows.append([f"a miss, to {name}'s", *row])
    return rows


def changes(client: redis.Redis, caches: Any) -> list[list[object]]:
    """Changes that end leases, too; beside what the base class does."""
    base, ours = (caches[name] for name in BACKENDS["django-redis"])
    numbers, keys = iter(range(10**9)), [f"changed:{number}" for number in range(1000)]

    def compute_by_hand() -> Any:
        found = base.get_many(keys)
        return base.set_many({key: 1 for key in keys if key not in found}, 60)

    pairs: list[tuple[str, Callable[[Any], Any], int]] = [
        ("set with a timeout of 60 s", lambda cache: cache.set("changed", 1, 60), 500),
        ("set with a timeout of 5 s", lambda cache: cache.set("changed", 1, 5), 500),
        ("add with a timeout of 5 s", lambda cache: cache.add(f"added:{next(numbers)}", 1, 5), 500),
        ("delete", lambda cache: cache.delete("changed"), 500),
        ("delete_many of 100 keys", lambda cache: cache.delete_many(keys[:100]), 20),
    ]
    rows: list[list[object]] = []
    for what, change, calls in pairs:
        change(ours)
        rows.append([what, *ratios(client, partial(change, base), partial(change, ours), calls)])

    def compute_anew(compute: Callable[[], Any]) -> None:
        client.delete(*(f":1:{key}" for key in keys))
        compute()

    missing = partial(compute_anew, lambda: ours.get_or_set_many(keys, lambda asked: dict.fromkeys(asked, 1), 60))
    row = ratios(client, partial(compute_anew, compute_by_hand), missing, 1)
    rows.append(["get_or_set_many of 1,000 keys that are missing, to get_many and set_many", *row])
    return rows


def sent_by(client: redis.Redis, call: Callable[[], Any]) -> list[int]:
    """Return how many commands the call sends, how many scripts send inside the server, and the kilobytes both ways."""

    def counts() -> tuple[int, int, int, int]:
        found = client.info("all")
        calls = {name.removeprefix("cmdstat_"): each["calls"] for name, each in found.items() if "cmdstat_" in name}
        scripts = calls.get("evalsha", 0) + calls.get("eval", 0)
        sizes = found["total_net_input_bytes"], found["total_net_output_bytes"]
        return found["total_commands_processed"], scripts, *sizes

    client.info("all")
    nothing = counts()
    before = counts()
    call()
    after = counts()
    commands, scripts, inbound, outbound = (
        later - earlier - (earlier - first) for later, earlier, first in zip(after, before, nothing, strict=True)
    )
    return [commands, scripts, round(inbound / 1000), round(outbound / 1000)]


def counted(client: redis.Redis, caches: Any) -> list[list[object]]:
    """What missing keys cost, counted, so that the load of the machine plays no part; and the time of three rounds."""
    from django_redislock.core import events

    base, ours = (caches[name] for name in BACKENDS["django-redis"])
    rows: list[list[object]] = []
    for count in (1000, 3000):
        keys = [f"counted:{number}" for number in range(count)]

        def by_hand(keys: list[str] = keys) -> None:
            found = base.get_many(keys)
            base.set_many({key: 1 for key in keys if key not in found}, 60)

        def by_us(keys: list[str] = keys) -> None:
            ours.get_or_set_many(keys, lambda asked: dict.fromkeys(asked, 1), 60)

        for what, call, prepare in (
            ("get_many and set_many", by_hand, client.flushdb),
            ("get_or_set_many", by_us, client.flushdb),
            ("get_or_set_many, scripts unknown", by_us, lambda: (client.flushdb(), client.script_flush())),
        ):
            for _ in range(2):  # the first one makes the scripts known
                prepare()
                call()
            prepare()
            batches: list[object] = []

            def observe(name: str, about: Any, batches: list[object] = batches) -> Any:
                if name == "command":
                    batches.append(about)
                return nullcontext()

            events.observers.append(observe)
            figures = sent_by(client, call)
            events.observers.remove(observe)
            times = []
            for _ in range(3):
                prepare()
                began = time.process_time()
                call()
                times.append((time.process_time() - began) * 1000)
            rows.append([f"{count:,} keys, {what}", *figures, len(batches) or 2, f"{statistics.median(times):.0f}"])
    client.flushdb()
    return rows


def wait_for_many(url: str, leads: bool, count: int, tasks: bool, begins: Any, ended: Any) -> None:
    configure(url)
    from django.core.cache import caches

    cache = caches[BACKENDS["django-redis"][1]]

    def compute(keys: list[str]) -> dict[str, str]:
        if leads:
            begins[1].set()
            time.sleep(0.3)
        return dict.fromkeys(keys, "value")

    if not tasks:
        cache.get_or_set_many([f"warm:{os.getpid()}"], lambda keys: dict.fromkeys(keys, 1))
    keys = [f"{count}:{tasks}:{number}" for number in range(count)]
    begins[not leads].wait()
    began = time.monotonic()
    if tasks:
        asyncio.run(cache.aget_or_set_many(keys, compute, 60))
    else:
        cache.get_or_set_many(keys, compute, 60)
    ended.put((leads, time.monotonic() - began))


def waiting(url: str) -> list[list[object]]:
    """Another process wants the same keys while one computes them for 0.3 s, behind a round trip of 5 ms."""
    rows: list[list[object]] = []
    with delayed(url, 0.005) as far:
        for tasks in (False, True):
            begins, ended = [FORK.Event(), FORK.Event()], FORK.SimpleQueue()
            children = [
                FORK.Process(target=wait_for_many, args=(far, leads, 1000, tasks, begins, ended))
                for leads in (True, False)
            ]
            for child in children:
                child.start()
            begins[0].set()
            times = dict(ended.get() for _ in children)
            for child in children:
                child.join()
            how = "async" if tasks else "sync"
            rows.append(
                [f"1,000 keys, {how}", f"{times[True]:.2f}", f"{times[False]:.2f}", f"{times[False] / times[True]:.2f}"]
            )
    return rows


def main() -> None:
    with server() as url, redis.Redis.from_url(url) as client:
        head = ["", "s of who computes", "s of who waits", "ratio"]
        table("Another process wants the same keys, a round trip of 5 ms away", head, waiting(url))
        client.flushdb()
        configure(url)
        from django.core.cache import caches

        head = [
            "",
            "commands, with those of scripts",
            "scripts",
            "kB to the server",
            "kB back",
            "round trips",
            "ms of CPU",
        ]
        table("Missing keys, counted", head, counted(client, caches))
        head = ["", "client's CPU, to its base", "server's CPU", "ms of the base"]
        for title, measure in (("Many keys", many), ("Stale values", stale), ("Misses", misses), ("Changes", changes)):
            table(title, head, measure(client, caches))


if __name__ == "__main__":
    main()

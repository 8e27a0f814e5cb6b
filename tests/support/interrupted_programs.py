"""What the processes of the interruption tests do: signal handlers and destructors that use locks and the cache."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django_redislock.core import Lock
from tests.support import client_at, queued, say, wait_until
from tests.support.cache_programs import cache_at


def acquire_in_a_handler(url: str, main: str, inside: str) -> None:
    """Wait for the lock `main`, and in the handler of SIGUSR1 for the lock `inside`."""
    client = client_at(url)

    def handler(*args: object) -> None:
        with Lock(client, inside, timeout=60):
            say(handler=True)

    signal.signal(signal.SIGUSR1, handler)
    with Lock(client, main, timeout=60):
        say(main=True)


def acquire_while_a_handler_runs(url: str, main: str, others: list[str]) -> None:
    """Wait for the lock `main`, and in threads for the others; at SIGUSR1 a handler runs until a line comes."""
    client = client_at(url)

    def acquire(name: str) -> None:
        with Lock(client, name, expire=120, timeout=60):
            say(got=name)

    def handler(*args: object) -> None:
        say(handler="begins")
        input()

    def start_threads() -> None:
        wait_until(lambda: queued(client, main) == 1)  # so that the main thread reads for all
        for thread in threads:
            thread.start()

    signal.signal(signal.SIGUSR1, handler)
    threads = [threading.Thread(target=acquire, args=[name]) for name in others]
    starter = threading.Thread(target=start_threads)
    starter.start()
    acquire(main)
    for thread in (starter, *threads):
        thread.join()


@contextmanager
def interrupted(handle: Callable[[int], object], times: int) -> Iterator[Callable[[], bool]]:
    """Call the function in a signal handler again and again, at random points; yield what tells if it was so often.

    A handler may be interrupted by another one, but not by many; it is told how many it interrupts.
    """
    depth = count = 0
    ended = False

    def handler(*args: object) -> None:
        nonlocal depth, count
        if ended:
            return
        if depth < 2:
            depth += 1
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.003))
            handle(depth - 1)
            count += 1
            depth -= 1
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.003))

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    yield lambda: count >= times
    ended = True
    signal.setitimer(signal.ITIMER_REAL, 0)


def count_under_locks(url: str, times: int, options: dict[str, int]) -> None:
    """Count under locks in threads and in the main thread; handlers that interrupt it release a lock, look at one, and
    count under one if it is free; destructors try for one."""
    client = client_at(url, **options)
    ended = threading.Event()
    counts = dict.fromkeys("abc", 0)
    done: list[str] = []
    longest = 0.0
    others = [Lock(client, f"released {number}", expire=600) for number in range(times)]
    for other in others:
        other.acquire()

    def count(name: str) -> None:
        with Lock(client, name, timeout=60):
            seen = counts[name]
            time.sleep(0)
            counts[name] = seen + 1
        done.append(name)

    def handle(depth: int) -> None:
        nonlocal longest
        started = time.monotonic()
        if others:
            others.pop().release()
        asked = Lock(client, "a")
        asked.locked(), asked.ttl(), asked.owner()
        counts_now = Lock(client, "bc"[depth])
        if counts_now.acquire(blocking=False):
            counts["bc"[depth]] += 1
            done.append("bc"[depth])
            counts_now.release()
        longest = max(longest, time.monotonic() - started)

    def keep_counting(name: str) -> None:
        while not ended.is_set():
            count(name)

    class Forgotten:
        def __init__(self) -> None:
            self.me = self  # so that it is collected at any allocation

        def __del__(self) -> None:
            lock = Lock(client, "d")  # held by what may wait for others, so nobody waits for it
            if not ended.is_set() and lock.acquire(blocking=False):
                lock.release()

    threads = [threading.Thread(target=keep_counting, args=(name,)) for name in "abbc"]
    for thread in threads:
        thread.start()
    gc.set_threshold(300)
    with interrupted(handle, times) as enough:
        while not enough():
            Forgotten()
            count("a")
    ended.set()
    for thread in threads:
        thread.join()
    free = all(Lock(client, name).acquire(blocking=False) for name in "abcd")
    say(counts=counts, done={name: done.count(name) for name in counts}, free=free, longest=longest)


def hit(url: str, backend: str, times: int) -> None:
    """Read a value that is there, and read it in handlers that interrupt that."""
    cache = cache_at(url, backend)
    cache.set("k", "v", 600)

    def read() -> None:
        assert cache.get_or_set("k", dict) == "v"

    inside = 0

    def handle(depth: int) -> None:
        nonlocal inside
        read()
        inside += 1

    outside = 0
    with interrupted(handle, times) as enough:
        while not enough() or outside < 20 * times:
            read()
            outside += 1
    say(hits=cache.stats().hits, expected=inside + outside)


def compute(url: str, backend: str, times: int) -> None:
    """Compute values that nobody has, also in handlers that interrupt that and want the same value."""
    cache = cache_at(url, backend)
    number = 0

    def want(depth: int = 0) -> None:
        key = f"k{number}"
        assert cache.get_or_set(key, lambda: key, 60, wait=20) == key

    want()  # with all imports, which nobody can interrupt by others
    with interrupted(want, times) as enough:
        while not enough():
            number += 1
            want()
    stats = cache.stats()
    say(keys=number + 1, computed=stats.computed, errors=stats.errors)

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from typing import Any, TypeVar

import redis

from django_redislock.core import AsyncLock, Lock
from django_redislock.core.clock import monotonic
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.core.lease import Lease
from django_redislock.core.watchdog import watchdog

from .counts import server_of_key
from .waiting import wait_until

T = TypeVar("T")

RLock = partial(Lock, reentrant=True)
AsyncRLock = partial(AsyncLock, reentrant=True)


def key_of(name: str) -> str:
    return lock_keys("redislock", name).lock


def queue_of(name: str) -> str:
    return lock_keys("redislock", name).queue


def held_on(clients: list[redis.Redis], name: str = "a") -> list[int]:
    """Return 1 for each server on which the lock is held, and 0 for each other one."""
    return [client.exists(key_of(name)) for client in clients]


def names_together(number: int) -> list[str]:
    """Return names of locks whose keys have one hash tag, so that they are at one node of a Cluster."""
    names = (f"lock {each}" for each in count())
    return list(
        islice(
            (name for name in names if lock_keys("redislock", name).held == lock_keys("redislock", "a").held), number
        )
    )


def name_of(task: Any, *args: Any) -> str:
    """Return the name of the lock of a single-instance task that is called with these arguments."""
    lock, *_ = task._locks(args, {})
    return lock.name


def queued(client: redis.Redis, name: str) -> int:
    """Return how many wait for the lock, of all processes."""
    return client.zcard(queue_of(name))


def watchdogs_of(client: redis.Redis) -> int:
    """Return how many threads of this process watch the locks on the client's server."""
    found = [getattr(thread, "_target", None) for thread in threading.enumerate() if "watchdog" in thread.name]
    runs: list[Any] = [target.args[0] for target in found if isinstance(target, partial)]  # an ended thread has none
    return sum(run.func.__self__ is server_of(client).watchdog for run in runs)


def renew_now(lock: Any) -> Lease:
    """Have the lock renewed ahead of time, and return its acquisition."""
    lease: Lease = lock._visible_lease()
    lease.next_renewal = monotonic()
    watchdog.reschedule(lease)
    return lease


def wait_until_renewed(lock: Any) -> None:
    """Have the lock renewed ahead of time, and wait until it is."""
    before = lock._visible_lease().deadline
    lease = renew_now(lock)
    wait_until(lambda: lease.deadline > before)


async def acquire_and_release(lock: AsyncLock) -> bool:
    async with lock:
        return True


def in_thread(function: Callable[..., T], *args: object) -> T:
    """Run the function in a thread of its own, and return what it returned."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join(timeout=20)
    assert results, "the thread did not finish"
    return results[0]


def begin(function: Callable[..., T], *args: object, **options: object) -> Future[T]:
    """Call the function in a thread of its own, and return the future of what it returns or raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def begin_to_wait(
    client: redis.Redis, name: str, function: Callable[..., T], *args: object, **options: object
) -> Future[T]:
    """Begin a call that waits for the lock, and return its future when it has its place in the queue."""
    before = queued(client, name)
    call = begin(function, *args, **options)
    wait_until(lambda: call.done() or queued(client, name) > before)
    return call


def enter(lock: Any) -> int:
    """Acquire the lock and release it, and return the fence of that acquisition."""
    with lock:
        return int(lock.fence)


def in_threads(number: int, work: Callable[[int], object]) -> None:
    """Run ``work(0)``, ``work(1)``, … in so many threads at once, and return when all have ended."""
    threads = [threading.Thread(target=work, args=(each,)) for each in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def side_by_side(*works: Callable[[], object]) -> Iterator[None]:
    """Call the functions in a thread each while the block runs, so that all wait at once; raise what one has raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        calls = [pool.submit(work) for work in works]
        yield
        for each in calls:
            each.result()


@contextmanager
def listening(client: redis.Redis, *channels: str, lock: str = "a") -> Iterator[Callable[[], list[str]]]:
    """Subscribe to channels as processes do that wait for the lock but are frozen.

    Give a function that tells what was said since its last call.
    """
    client = server_of_key(client, key_of(lock))
    with client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(*channels)
        for _ in channels:
            pubsub.parse_response()

        def told() -> list[str]:
            client.publish(channels[0], "end")
            return [data.decode() for data in iter(lambda: pubsub.get_message(timeout=5)["data"], b"end")]

        yield told


def wait_in_a_thread(client: redis.Redis, name: str) -> None:
    """Have a thread wait for a lock until it is released here, and return when the thread has released it, too.

    The wait lasts for some milliseconds of the server's clock, in which waits are counted.
    """
    held = Lock(client, name)
    assert held.acquire(blocking=False)

    def wait() -> None:
        with Lock(client, name):
            pass

    def has_waited() -> bool:
        entries = client.zrange(queue_of(name), 0, -1, withscores=True)
        seconds, us = client.time()
        return any(seconds * 1_000_000 + us - since > 5_000 for _, since in entries)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(has_waited)
    held.release()
    thread.join(60)
    assert not thread.is_alive()

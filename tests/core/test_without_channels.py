"""A user of Redis without channels: waiters look for their locks, because no wake-up can reach them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import redis

from django_redislock import conf
from django_redislock.celery.execution_lock import Delivery
from django_redislock.celery.options import complete
from django_redislock.core import AsyncLock, Lock, operations
from django_redislock.core.driver import wakeups
from django_redislock.core.driver.registry import server_of
from tests.support import RedisServer, acquire_and_release, counting, lived, queued, wait_until
from tests.support.cache_programs import cache_at
from tests.support.locks import AsyncRLock, RLock

pytestmark = pytest.mark.processes
_users = (f"app{number}" for number in count())


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def admin(guarded: RedisServer) -> Iterator[redis.Redis]:
    with guarded.client() as admin:
        admin.flushall()
        yield admin


@pytest.fixture
def user(admin: redis.Redis) -> str:
    """The name of a user of this test alone, who may do everything but use channels."""
    name = next(_users)
    admin.execute_command("ACL", "SETUSER", name, "on", ">secret", "~*", "+@all", "resetchannels")
    return name


@pytest.fixture
def as_user(guarded: RedisServer, user: str) -> Iterator[Callable[..., redis.Redis]]:
    """Return a function that returns a client of that user; those of different timeouts are as if in two processes."""
    clients = []

    def as_user(timeout: float = 5.0) -> redis.Redis:
        url = guarded.url.replace("//", f"//{user}:secret@")
        clients.append(redis.Redis.from_url(url, socket_timeout=timeout))
        return clients[-1]

    yield as_user
    for client in clients:
        client.close()


def starting(work: Callable[..., object], *args: Any, **options: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, kwargs=options)
    thread.start()
    return thread


def warnings(caplog: Any) -> list[str]:
    ours = [record for record in caplog.records if record.name == "django_redislock"]  # asyncio reports slow steps
    found = [record for record in ours if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in found]


@pytest.mark.parametrize("kind", [Lock, RLock])
def test_threads_get_their_locks_by_looking_and_one_warning_says_what_to_grant(
    admin: redis.Redis, as_user: Any, caplog: Any, kind: type[Lock]
) -> None:
    held, got = kind(as_user(), "a", expire=30), []
    held.acquire()

    def wait(client: redis.Redis) -> None:
        with kind(client, "a", timeout=30):
            got.append(threading.get_ident())

    clients = [as_user(), as_user(), as_user(4.9), as_user(4.8)]
    threads = [starting(wait, client) for client in clients]
    wait_until(lambda: admin.zcard(held._keys.queue) == 4, message="they wait in the queue")
    held.release()
    for thread in threads:
        thread.join(30)
    assert len(got) == 4
    assert not admin.exists(held._keys.queue, held._keys.lock)
    told = warnings(caplog)
    assert len(told) == 3, "one for each of what would be a process"
    assert "Grant +subscribe and the channels &redislock:wake:*; 'manage.py redislock doctor --acl'" in told[0]


@pytest.fixture(scope="module")
def without_channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that knows no SUBSCRIBE, as many a proxy."""
    renamed = tmp_path_factory.mktemp("renamed") / "renamed.conf"
    renamed.write_text('rename-command SUBSCRIBE ""')
    with RedisServer(include=str(renamed)) as server:
        yield server


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_where_subscribe_is_unknown_the_waiters_get_their_locks_by_looking(
    without_channels: RedisServer, caplog: Any, tasks: bool
) -> None:
    got: list[bool] = []

    def wait(client: redis.Redis) -> None:
        if tasks:
            got.append(asyncio.run(acquire_and_release(AsyncLock(client, "a", timeout=30))))
        else:
            with Lock(client, "a", timeout=30):
                got.append(True)

    with without_channels.client(socket_timeout=4.6 if tasks else 4.7) as client:
        held = Lock(client, "a")
        held.acquire()
        waiting = starting(wait, client)
        wait_until(lambda: queued(client, "a") == 1)
        held.release()
        waiting.join(30)
        assert got == [True]
    told = warnings(caplog)
    assert "refuses SUBSCRIBE (unknown command" in told[0]


@pytest.mark.parametrize("kind", [AsyncLock, AsyncRLock])
def test_tasks_get_their_locks_by_looking(admin: redis.Redis, as_user: Any, caplog: Any, kind: type[AsyncLock]) -> None:
    client, got = as_user(), []

    async def wait() -> None:
        async with kind(client, "a", timeout=30):
            got.append(asyncio.current_task())

    async def main() -> None:
        async with kind(client, "a", expire=30) as held:
            tasks = [asyncio.create_task(wait()) for _ in range(3)]
            await asyncio.to_thread(wait_until, lambda: admin.zcard(held._keys.queue) == 3)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    asyncio.run(main())
    assert len(got) == 6
    assert len(warnings(caplog)) == 1, "also if there is a loop for each task"


def test_the_timeout_of_the_caller_holds(admin: redis.Redis, as_user: Any) -> None:
    got: list[bool] = []
    with Lock(admin, "a", expire=30) as held:
        for acquire in (
            lambda: Lock(as_user(), "a").acquire(timeout=0.3),
            lambda: asyncio.run(AsyncLock(as_user(), "a").acquire(timeout=0.3)),
        ):
            starting(lambda acquire=acquire: got.append(acquire())).join(30)
        assert got == [False, False]
        assert not admin.exists(held._keys.queue), "they left the queue"


def test_a_lock_whose_holder_died_is_acquired_at_its_expiry(admin: redis.Redis, as_user: Any) -> None:
    held, got = Lock(admin, "a", expire=0.6, auto_renewal=False), []
    held.acquire()
    starting(lambda: got.append(Lock(as_user(), "a", expire=30).acquire(timeout=20))).join(30)
    assert got == [True]


def test_the_pauses_between_two_looks_grow(admin: redis.Redis, as_user: Any) -> None:
    client = as_user()
    with Lock(admin, "a", expire=30) as held:
        threads = [starting(Lock(client, "a").acquire, timeout=3) for _ in range(2)]
        wait_until(lambda: admin.zcard(held._keys.queue) == 2)
        with counting(admin) as counts:
            lived(2)
        assert counts["evalsha"] <= 2 * 10, "after 20, 40, 80, 160, 320 ms, and then 400 ms each"
        for thread in threads:
            thread.join(30)


def test_many_who_wait_share_their_looks(admin: redis.Redis, as_user: Any) -> None:
    client = as_user()
    with Lock(admin, "a", expire=60) as held:
        threads = [starting(Lock(client, "a").acquire, timeout=6) for _ in range(100)]
        wait_until(lambda: admin.zcard(held._keys.queue) == 100)
        lived(1)  # the first looks of those that came early are for a shorter queue
        with counting(admin) as counts:
            lived(3)
        assert counts["evalsha"] <= 3 * 32 * 1.5, "and not 250 a second"
        for thread in threads:
            thread.join(30)


def test_with_the_right_granted_wake_ups_arrive_again(
    admin: redis.Redis, as_user: Any, user: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(wakeups, "REFUSED_FOR", 0.5)
    client = as_user()
    room = server_of(client).room
    with Lock(admin, "a", expire=30):
        thread = starting(Lock(client, "a").acquire, timeout=30)
        wait_until(lambda: room.deaf)
        admin.execute_command("ACL", "SETUSER", user, "&redislock:wake:*")
        wait_until(lambda: room.open, message="the waiting thread has subscribed")
        assert not room.deaf
    thread.join(30)


def test_who_loses_the_right_during_a_wait_goes_on_by_looking(admin: redis.Redis, as_user: Any, user: str) -> None:
    admin.execute_command("ACL", "SETUSER", user, "allchannels")
    client, got = as_user(), []
    held = Lock(admin, "a", expire=30)
    held.acquire()
    thread = starting(lambda: got.append(Lock(client, "a", expire=30).acquire(timeout=30)))
    wait_until(lambda: queued(admin, "a") == 1)
    admin.execute_command("ACL", "SETUSER", user, "resetchannels")  # the server closes the subscription
    wait_until(lambda: server_of(client).room.deaf)
    held.release()
    thread.join(30)
    assert got == [True]


def test_who_waits_for_many_values_gets_them_by_looking(
    guarded: RedisServer, admin: redis.Redis, user: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(operations, "MAX_SLEEP", 60)  # as the expiry and the wait: later than this test gives up
    here, there = (
        cache_at(guarded.url.replace("//", f"//{user}:secret@") + f"?socket_timeout={timeout}") for timeout in (5, 4.9)
    )
    started, end = threading.Event(), threading.Event()

    def compute(keys: list[str]) -> dict[str, int]:
        started.set()
        assert end.wait(30)
        return dict.fromkeys(keys, 1)

    results: list[dict[str, int]] = []
    first = starting(lambda: results.append(here.get_or_set_many(["x", "y"], compute, expire=60)))
    assert started.wait(30)
    second = starting(lambda: results.append(there.get_or_set_many(["x", "y"], dict.fromkeys, wait=60)))
    wait_until(lambda: server_of(there.client.get_client()).room.deaf)
    end.set()
    first.join(30)
    second.join(30)
    assert results == [{"x": 1, "y": 1}] * 2


def test_an_execution_of_a_task_gets_its_lock_by_looking(
    guarded: RedisServer, admin: redis.Redis, user: str, settings: Any
) -> None:
    settings.DJANGO_REDISLOCK = {"URL": guarded.url.replace("//", f"//{user}:secret@")}
    got: list[bool] = []
    execution = complete({}, conf.get()).lock.with_name("t", delivery=Delivery("task", "task:0:one", known=True))
    with Lock(admin, "t", expire=30) as held:
        thread = starting(lambda: got.append(execution.acquire(timeout=30)))
        wait_until(lambda: admin.zcard(held._keys.queue) == 1)
    thread.join(30)
    assert got == [True]

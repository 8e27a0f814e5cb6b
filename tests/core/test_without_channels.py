"""A user of Redis without channels: waiters look for their locks, because no wake-up can reach them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
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
from django_redislock.exceptions import LockBackendError
from tests.support import (
    Proxy,
    RedisServer,
    acquire_and_release,
    begin,
    begin_to_wait,
    client_at,
    counting,
    enter,
    in_thread,
    key_of,
    lived,
    queue_of,
    queued,
    until,
    wait_until,
)
from tests.support.cache_programs import cache_at
from tests.support.twemproxy import twemproxy

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


def warnings(caplog: Any) -> list[str]:
    ours = [record for record in caplog.records if record.name == "django_redislock"]  # asyncio reports slow steps
    found = [record for record in ours if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in found]


@pytest.mark.parametrize("reentrant", [False, True])
def test_waiters_get_their_locks_by_looking_and_one_warning_says_what_to_grant(
    make_lock: Any, admin: redis.Redis, as_user: Any, caplog: Any, reentrant: bool
) -> None:
    held = make_lock(as_user(), "a", expire=30, reentrant=reentrant)
    held.acquire()
    clients = [as_user(), as_user(), as_user(4.9), as_user(4.8)]
    waiters = [begin(enter, make_lock(client, "a", timeout=30, reentrant=reentrant)) for client in clients]
    wait_until(lambda: queued(admin, "a") == 4, message="they wait in the queue")
    held.release()
    assert len({waiter.result(30) for waiter in waiters}) == 4
    assert not admin.exists(queue_of("a"), key_of("a"))
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


def test_where_subscribe_is_unknown_the_waiters_get_their_locks_by_looking(
    make_lock: Any, without_channels: RedisServer, caplog: Any
) -> None:
    # The timeout makes a server of its own of it, which warns, too.
    with without_channels.client(socket_timeout=4.6 if make_lock is Lock else 4.7) as client:
        held = Lock(client, "a")
        held.acquire()
        waiter = begin_to_wait(client, "a", enter, make_lock(client, "a", timeout=30))
        held.release()
        assert waiter.result(30)
    assert "refuses SUBSCRIBE (unknown command" in warnings(caplog)[0]


def test_where_subscribe_closes_the_connection_the_waiters_get_their_locks_by_looking(
    make_lock: Any, guarded: RedisServer, caplog: Any
) -> None:
    """As behind a proxy that does not know the command: acquire() raised after a second."""
    with Proxy(guarded.url) as proxy, client_at(proxy.url) as client, guarded.client() as admin:
        proxy.drop_next_reply(10**6, containing=b"SUBSCRIBE")
        held = Lock(client, "a", expire=30)
        held.acquire()
        assert in_thread(lambda: make_lock(client, "a").acquire(timeout=1)) is False
        waiter = begin_to_wait(admin, "a", enter, make_lock(client, "a", timeout=30))
        held.release()
        assert waiter.result(30)
        assert proxy.dropped == 2
    assert "refuses SUBSCRIBE (it closes the connection)" in warnings(caplog)[0]


def test_a_subscription_that_is_closed_once_is_made_again(make_lock: Any, guarded: RedisServer, caplog: Any) -> None:
    with Proxy(guarded.url) as proxy, client_at(proxy.url) as client, guarded.client() as admin:
        proxy.drop_next_reply(1, containing=b"SUBSCRIBE")
        with Lock(client, "a", expire=30):
            waiter = begin_to_wait(admin, "a", enter, make_lock(client, "a", timeout=30))
            assert admin.pubsub_channels("redislock:wake:*")
        assert waiter.result(30)
    assert warnings(caplog) == []


def test_through_twemproxy_locks_are_acquired_and_waited_for(make_lock: Any, guarded: RedisServer) -> None:
    with twemproxy(guarded) as url, client_at(url) as client, guarded.client() as admin:
        admin.flushall()
        held = Lock(client, "a", expire=30)
        held.acquire()
        assert in_thread(lambda: make_lock(client, "a").acquire(timeout=1)) is False
        waiter = begin_to_wait(admin, "a", enter, make_lock(client, "a", timeout=30))
        held.release()
        assert waiter.result(30)


WITHOUT_DESCRIPTORS = """
import asyncio, os, redis, redis.asyncio, resource
from django_redislock.core import AsyncLock, Lock
url, kind = args

def use_up():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    try:
        while True:
            os.open(os.devnull, os.O_RDONLY)
    except OSError:
        say(full=True)

async def wait():
    other = AsyncLock(redis.asyncio.Redis.from_url(url), "a")
    assert not await other.acquire(blocking=False)
    use_up()
    say(got=await other.acquire(timeout=1))
    say(got=await other.acquire(timeout=60))
    await other.release()

if kind == "AsyncLock":
    asyncio.run(wait())
else:
    other = Lock(redis.Redis.from_url(url), "a")
    assert not other.acquire(blocking=False)
    use_up()
    say(got=other.acquire(timeout=1))
    say(got=other.acquire(timeout=60))
    other.release()
"""


@pytest.mark.parametrize("kind", ["Lock", "AsyncLock"])
def test_a_process_that_can_open_no_second_connection_looks(
    admin: redis.Redis, guarded: RedisServer, run_python: Any, kind: str
) -> None:
    """Its wait ended with an error after a second."""
    with Lock(admin, "a", expire=30):
        process = run_python(WITHOUT_DESCRIPTORS, guarded.url, kind)
        process.wait_for(full=True)
        process.wait_for(got=False)
        wait_until(lambda: queued(admin, "a"))
    process.wait_for(got=True)
    assert process.wait() == 0, process.errors  # it leaves the descriptors open
    assert "No connection for wake-ups can be opened ([Errno 24] Too many open files)" in process.errors


def test_tasks_of_several_loops_get_their_locks_by_looking(admin: redis.Redis, as_user: Any, caplog: Any) -> None:
    client = as_user()

    async def main() -> None:
        async with AsyncLock(client, "a", expire=30):
            tasks = [asyncio.create_task(acquire_and_release(AsyncLock(client, "a", timeout=30))) for _ in range(3)]
            await until(lambda: queued(admin, "a") == 3)
        assert await asyncio.gather(*tasks) == [True] * 3

    asyncio.run(main())
    asyncio.run(main())
    assert len(warnings(caplog)) == 1, "also if there is a loop for each task"


def test_a_lock_whose_holder_died_is_acquired_at_its_expiry(admin: redis.Redis, as_user: Any) -> None:
    Lock(admin, "a", expire=0.6, auto_renewal=False).acquire()
    assert in_thread(lambda: Lock(as_user(), "a", expire=30).acquire(timeout=20))


def test_the_pauses_between_two_looks_grow(admin: redis.Redis, as_user: Any) -> None:
    client = as_user()
    with Lock(admin, "a", expire=30):
        waiters = [begin(enter, Lock(client, "a", timeout=300)) for _ in range(2)]
        wait_until(lambda: queued(admin, "a") == 2)
        began = time.monotonic()
        with counting(admin) as counts:
            lived(2)
        seconds = time.monotonic() - began
        assert counts["evalsha"] <= 2 * (5 + seconds / 0.4), "after 20, 40, 80, 160, 320 ms, and then 400 ms each"
    assert all(waiter.result(30) for waiter in waiters)


def test_many_who_wait_share_their_looks(admin: redis.Redis, as_user: Any, user: str) -> None:
    client = as_user()
    with Lock(admin, "a", expire=60):
        waiters = [begin(Lock(client, "a").acquire, timeout=300) for _ in range(100)]
        wait_until(lambda: queued(admin, "a") == 100)
        lived(1)  # the first looks of those that came early are for a shorter queue
        began = time.monotonic()
        with counting(admin) as counts:
            lived(3)
        seconds = time.monotonic() - began
        assert counts["evalsha"] <= seconds * 32 * 1.5, "and not 250 a second"
        admin.execute_command("ACL", "DELUSER", user)
        for waiter in waiters:
            with pytest.raises(LockBackendError):
                waiter.result(60)


def test_with_the_right_granted_wake_ups_arrive_again(
    admin: redis.Redis, as_user: Any, user: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(wakeups, "REFUSED_FOR", 0.5)
    client = as_user()
    room = server_of(client).room
    with Lock(admin, "a", expire=30):
        waiter = begin(Lock(client, "a").acquire, timeout=30)
        wait_until(lambda: room.deaf)
        admin.execute_command("ACL", "SETUSER", user, "&redislock:wake:*")
        wait_until(lambda: room.open, message="the waiting thread has subscribed")
        assert not room.deaf
    assert waiter.result(30)


def test_who_loses_the_right_during_a_wait_goes_on_by_looking(admin: redis.Redis, as_user: Any, user: str) -> None:
    admin.execute_command("ACL", "SETUSER", user, "allchannels")
    client = as_user()
    held = Lock(admin, "a", expire=30)
    held.acquire()
    waiter = begin_to_wait(admin, "a", Lock(client, "a", expire=30).acquire, timeout=30)
    admin.execute_command("ACL", "SETUSER", user, "resetchannels")  # the server closes the subscription
    wait_until(lambda: server_of(client).room.deaf)
    held.release()
    assert waiter.result(30)


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

    first = begin(here.get_or_set_many, ["x", "y"], compute, expire=60)
    assert started.wait(30)
    second = begin(there.get_or_set_many, ["x", "y"], dict.fromkeys, wait=60)
    wait_until(lambda: server_of(there.client.get_client()).room.deaf)
    end.set()
    assert [first.result(30), second.result(30)] == [{"x": 1, "y": 1}] * 2


def test_an_execution_of_a_task_gets_its_lock_by_looking(
    guarded: RedisServer, admin: redis.Redis, user: str, settings: Any
) -> None:
    settings.DJANGO_REDISLOCK = {"URL": guarded.url.replace("//", f"//{user}:secret@")}
    execution = complete({}, conf.get()).lock.with_name("t", delivery=Delivery("task", "task:0:one", known=True))
    with Lock(admin, "t", expire=30):
        waiter = begin_to_wait(admin, "t", execution.acquire, timeout=30)
    assert waiter.result(30)

"""AsyncLock where tasks differ from threads; what they have in common is asked of it in test_lock_by_tasks.py."""

from __future__ import annotations

import asyncio
import gc
import math
import pickle
import subprocess
import threading
import time
import types
import weakref
from contextlib import AsyncExitStack, suppress

import pytest
import redis
import redis.asyncio
from asgiref.sync import async_to_sync, sync_to_async
from django.test import override_settings

from django_redislock import AcquireTimeout, AlreadyAcquired, LockBackendError, LockLost, NotAcquired, alock
from django_redislock.cache.lease.obtain import ValueRequest, fly
from django_redislock.core import AsyncLock, AsyncRLock, Lock
from django_redislock.core.driver.async_server import async_server_of
from django_redislock.core.driver.registry import server_of
from django_redislock.core.driver.resp import encode_command
from django_redislock.core.keys import lock_keys
from tests.cache.test_clients import sentinel  # noqa: F401 - a fixture
from tests.support import (
    BUSY,
    RedisServer,
    counting,
    find_program,
    free_port,
    in_a_fork,
    key_of,
    lock_programs,
    queued,
    wait_until,
)

KEYS = lock_keys("redislock", "a")


async def until(condition, timeout=10):
    """Wait for the condition, and let the other tasks run meanwhile."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"Not within {timeout} s: {condition}"
        await asyncio.sleep(0.005)


def waiting(client, name="a"):
    return queued(client, name)


@pytest.fixture
def aclient(redis_url):
    return redis.asyncio.from_url(redis_url)  # the locks connect by themselves, so there is nothing to close


# Clients


@pytest.mark.parametrize(
    "options",
    [{"decode_responses": True}, {"protocol": 3}, {"protocol": 2}, {"socket_timeout": None}, {"max_connections": 1}],
    ids=repr,
)
def test_every_asyncio_client_will_do(redis_url, options):
    async def main():
        client = redis.asyncio.from_url(redis_url, **options)
        async with AsyncLock(client, "a") as lock:
            assert (await lock.owner()).id == lock.id
            assert not await AsyncLock(client, "a").acquire(timeout=0.1)

    asyncio.run(main())


def test_unix_sockets_will_do(own_server):
    async def main(client):
        async with AsyncLock(client, "a") as lock:
            assert await lock.owned()

    asyncio.run(main(redis.asyncio.from_url(own_server.unix_url)))
    with redis.Redis.from_url(own_server.unix_url) as client:
        asyncio.run(main(client))


@pytest.mark.parametrize("kind", [redis.Redis, redis.asyncio.Redis])
def test_tls_will_do(tmp_path, kind):
    program = find_program("redis-server", package="redis-server")
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port()
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = [find_program("openssl", package="openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*make, "-keyout", key, "-out", certificate, *names], check=True, capture_output=True)
    options = {"tls_cert_file": certificate, "tls_key_file": key, "tls_ca_cert_file": certificate}
    with RedisServer(program, tls_port=str(port), tls_auth_clients="no", **options) as server:
        client = kind(host="127.0.0.1", port=port, ssl=True, ssl_ca_certs=str(certificate))

        async def main():
            async with AsyncLock(client, "a") as lock:
                task = asyncio.create_task(hold(AsyncLock(client, "a")))
                await until_queued(lock)
                assert await lock.owned()
            assert await task
            server.pause()  # a server that does not take its leave keeps no loop from ending

        started = time.monotonic()
        asyncio.run(main())
        assert time.monotonic() - started < 10
        server.resume()
        if kind is redis.Redis:
            client.close()


async def until_queued(lock):
    while not (await lock.owner()).waiting:
        await asyncio.sleep(0.005)


async def hold(lock):
    async with lock:
        return True


def test_clients_for_threads_and_for_asyncio_share_a_server(redis_url, client):
    assert server_of(redis.asyncio.from_url(redis_url)) is server_of(client)


@pytest.mark.processes
def test_sentinel_is_asked_for_the_primary(sentinel):  # noqa: F811
    """Also when the primary became a replica while connections stay open: the next one goes where Sentinel says."""
    manager = redis.sentinel.Sentinel([("127.0.0.1", sentinel)], socket_timeout=5)
    primary = manager.master_for("main")
    asked = manager.sentinels[0]

    async def main(promoted):
        async with AsyncLock(primary, "a") as lock:
            assert await lock.owned()
        primary.replicaof("127.0.0.1", promoted.port)
        asked.sentinel_remove("main")
        asked.sentinel_monitor("main", "127.0.0.1", promoted.port, 1)
        async with AsyncLock(primary, "a", timeout=4):
            with promoted.client() as client:
                assert client.exists(key_of("a"))

    with RedisServer() as promoted:
        asyncio.run(main(promoted))
    primary.close()
    manager.close()


def test_a_client_without_a_counterpart_is_refused(redis_url):
    manager = redis.asyncio.Sentinel([("127.0.0.1", 1)])
    with pytest.raises(TypeError, match="the synchronous client of the same server"):
        AsyncLock(manager.master_for("main"), "a")

    class Special(redis.Connection):
        pass

    lock = AsyncLock(
        redis.Redis(connection_pool=redis.ConnectionPool.from_url(redis_url, connection_class=Special)), "a"
    )
    with pytest.raises(TypeError, match="no counterpart for asyncio"):
        asyncio.run(lock.acquire())


# Who holds it


def test_tasks_that_share_an_object_take_turns_and_cannot_release_for_each_other(aclient, client):
    lock = AsyncLock(aclient, "a", expire=5)
    inside, most, order = [], [], []

    async def work(number):
        async with lock:
            inside.append(1)
            most.append(len(inside))
            order.append(number)
            fence = lock.fence
            await asyncio.sleep(0)
            assert lock.fence == fence
            inside.pop()

    async def main():
        async with lock:
            with pytest.raises(NotAcquired):
                await asyncio.create_task(release())
            assert await lock.owned()
            assert not await asyncio.create_task(owned())
            tasks = []
            for number in range(6):
                tasks.append(asyncio.create_task(work(number)))
                await until(lambda: waiting(client) == len(tasks))
        await asyncio.gather(*tasks)

    async def release():
        await lock.release()

    async def owned():
        return await lock.owned()

    asyncio.run(main())
    assert most == [1] * 6
    assert order == list(range(6))


def test_one_task_twice_raises_instead_of_hanging(aclient):
    async def main():
        lock = AsyncLock(aclient, "a")
        async with lock:
            with pytest.raises(AlreadyAcquired):
                await lock.acquire()
        results = await asyncio.gather(lock.acquire(), lock.acquire(), return_exceptions=True)
        assert [type(result) for result in results] == [bool, AlreadyAcquired]
        await lock.release()

    asyncio.run(main())


def test_what_is_kept_of_tasks_that_ended_is_little_and_keeps_none_of_them(aclient, client):
    tasks = weakref.WeakSet()

    async def lose(lock, operation):
        await lock.acquire()
        client.delete(KEYS.lock)
        with pytest.raises(LockLost):
            await getattr(lock, operation)()

    async def main():
        lock = AsyncLock(aclient, "a", auto_renewal=False)
        for number in range(300):
            task = asyncio.create_task(lose(lock, ("release", "extend")[number % 2]))
            tasks.add(task)
            await task
        del task
        await lock.acquire()
        gc.collect()
        assert len(tasks) <= 1
        assert len(lock._leases) <= 2
        assert len(lock._leases._ended) < 100
        await lock.release()

    asyncio.run(main())


def test_the_task_that_calls_is_the_holder_whichever_task_runs_it(aclient):
    async def main():
        one, two = AsyncLock(aclient, "a", expire=2), AsyncLock(aclient, "b")
        assert await asyncio.wait_for(one.acquire(), 5)
        assert await asyncio.gather(two.acquire(), asyncio.shield(two.owned())) == [True, False]
        fence = one.fence
        await asyncio.sleep(2.5)
        assert await one.owned(), "renewed, for its task goes on"
        assert (one.fence, one.lost) == (fence, None)
        await asyncio.shield(two.release())
        await asyncio.wait_for(one.extend(5), 5)
        await asyncio.wait_for(one.release(), 5)
        assert not await one.locked()

    asyncio.run(main())


def test_a_thread_that_works_for_a_task_may_ask_its_lock(aclient, client):
    async def main():
        lock = AsyncLock(aclient, "a", auto_renewal=False)
        async with AsyncLock(aclient, "b"), lock:
            await sync_to_async(lock.raise_if_lost)()
            await asyncio.to_thread(lock.raise_if_lost)
            client.delete(KEYS.lock)
            with pytest.raises(LockLost):
                await lock.extend()
            with pytest.raises(LockLost):
                await sync_to_async(lock.raise_if_lost)()
            await lock.acquire()

    asyncio.run(main())


def test_without_asyncio_it_is_told_that_it_needs_it(aclient):
    """Under trio, say: it steps through coroutines as this does."""
    lock = AsyncLock(aclient, "a")
    for operation in (lock.acquire, lock.release, lock.extend, lock.owner, lock.locked, lock.reset, lock.__aenter__):
        coroutine = operation()
        with pytest.raises(RuntimeError, match=r"AsyncLock is for asyncio only.*trio"):
            coroutine.send(None)


def test_what_a_coroutine_function_is_tells():
    assert all(
        asyncio.iscoroutinefunction(getattr(AsyncLock, name))
        for name in ("acquire", "release", "extend", "owner", "locked", "owned", "ttl", "reset")
    )


@pytest.mark.parametrize("name", ["a task", "the loop"])
def test_who_ends_without_releasing_leaves_nothing_renewed(aclient, client, caplog, name):
    lock = AsyncLock(aclient, "a", expire=1.5)

    async def main():
        if name == "a task":
            await asyncio.create_task(acquire())
            await until(lambda: not client.exists(KEYS.lock))
        else:
            await lock.acquire()

    async def acquire():
        await lock.acquire()

    asyncio.run(main())
    wait_until(lambda: not client.exists(KEYS.lock))
    wait_until(lambda: "ended without releasing" in caplog.text)


def test_a_loop_that_is_closed_with_its_tasks_pending_leaves_nothing_renewed(aclient, client, caplog):
    async def hold():
        async with AsyncLock(aclient, "a", expire=1.5):
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    task = loop.create_task(hold())
    with suppress(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(asyncio.shield(task), 0.3))
    assert client.exists(KEYS.lock)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    wait_until(lambda: not client.exists(KEYS.lock))
    wait_until(lambda: "ended without releasing" in caplog.text)
    task._log_destroy_pending = False
    with suppress(RuntimeError):  # its block cannot be left without a loop; here, and not whenever it is collected
        task.get_coro().close()


def test_on_lost_is_called_in_the_loop_of_the_holder(aclient, client):
    told = []

    async def main():
        task = asyncio.current_task()

        def stop(lock):
            told.append((threading.get_ident(), lock.name))
            task.cancel()

        async with AsyncLock(aclient, "a", expire=0.5, on_lost=stop):
            client.delete(KEYS.lock)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(20)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        asyncio.run(main())
    assert isinstance(caught.value.__context__, LockLost) or caught.value.__context__ is not None
    assert told == [(threading.get_ident(), "a")]


def test_on_lost_is_a_plain_function(aclient):
    async def on_lost(lock):
        pass

    with pytest.raises(TypeError, match="on_lost"):
        AsyncLock(aclient, "a", on_lost=on_lost)


def test_a_block_of_a_generator_may_be_left_by_another_task(aclient, caplog):
    lock = AsyncLock(aclient, "a")

    async def held():
        async with lock:
            yield

    async def main():
        generator = held()
        await anext(generator)
        await asyncio.create_task(close(generator))
        assert not await lock.locked()
        # Among several it is not known which, and nobody's lock is freed; a task that is inside itself leaves its own.
        async with lock:
            await lock.release()
            generator = held()
            await asyncio.create_task(start(generator))
            with pytest.raises(NotAcquired):
                await lock.release()
            with pytest.raises(NotAcquired):
                await lock.__aexit__(None, None, None)
            assert await lock.locked()
            lock._entrants.append(asyncio.current_task())
            await asyncio.create_task(close(generator))
            assert not await lock.locked()
            await lock.acquire()
        others = [held(), held()]
        for other in others:
            await asyncio.create_task(start(other))
            await lock.reset()
        await close(others[0])
        assert "is not held by this thread or task" in caplog.text

    async def start(generator):
        await anext(generator)

    async def close(generator):
        await generator.aclose()

    asyncio.run(main())


# Re-entrance


def test_a_task_may_enter_again_and_others_wait(aclient, client):
    async def main():
        one, two = AsyncRLock(aclient, "a"), AsyncRLock(aclient, "a")
        async with one:
            async with two, one:
                assert (one.id, one.fence) == (two.id, two.fence)
                other = asyncio.create_task(hold(AsyncRLock(aclient, "a")))
                await until(lambda: waiting(client) == 1)
            assert await one.owned()
            assert not other.done()
        assert await other
        async with one:
            client.delete(KEYS.lock)
            with pytest.raises(LockLost):
                await two.acquire()
            with pytest.raises(LockLost):
                await one.release()
            await one.acquire()
        assert await hold(two)

    asyncio.run(main())


# Cancellation


@types.coroutine
def cancelled_at(coroutine, nth, late):
    """Run the coroutine in a task that is cancelled at its nth suspension: at once, or when what it waits for is there."""
    steps, count = coroutine.__await__(), 0
    proceed = steps.__next__
    while True:
        try:
            future = proceed()
        except StopIteration as stop:
            return stop.value
        count += 1
        if count == nth:
            task = asyncio.current_task()
            if late and future is not None:
                future.add_done_callback(lambda _, task=task: task.cancel())  # before the task itself hears of it
            else:
                task.cancel()
        try:
            result = yield future
        except BaseException as error:
            proceed = lambda error=error: steps.throw(error)  # noqa: E731
        else:
            proceed = lambda result=result: steps.send(result)  # noqa: E731


async def take(lock, client):
    await lock.acquire()
    await lock.release()


async def take_with_warm_connections(lock, client):
    await lock.acquire()


async def wait_and_take(lock, client):
    client.set(KEYS.lock, "x\n1\n1\n{}", px=30000)
    task = asyncio.create_task(free_it(client))
    try:
        await lock.acquire()
        await lock.release()
    finally:
        task.cancel()


async def free_it(client):
    await until(lambda: waiting(client) == 1)
    Lock(client, "a").reset()


async def try_once(lock, client):
    client.set(KEYS.lock, "x\n1\n1\n{}", px=30000)
    await lock.acquire(blocking=False)


async def block(lock, client):
    async with lock:
        await asyncio.sleep(0)


async def give_up(lock, client):
    client.set(KEYS.lock, "x\n1\n1\n{}", px=30000)
    await lock.acquire(timeout=0.05)


@pytest.mark.parametrize("late", [False, True], ids=["when it begins to wait", "when it need not wait any longer"])
@pytest.mark.parametrize(
    ("what", "least"),
    [(take, 3), (take_with_warm_connections, 1), (wait_and_take, 6), (try_once, 2), (block, 4), (give_up, 6)],
)
def test_cancelled_anywhere_nothing_is_left(aclient, client, what, least, late):
    async def main(nth):
        lock = AsyncLock(aclient, "a")
        if what is take_with_warm_connections:
            async with lock:
                pass
        task = asyncio.create_task(cancelled(lock, nth))
        await asyncio.wait([task])
        if task.cancelled():
            # Free for the next one at once; what another one holds stays.
            await until(
                lambda: client.get(KEYS.lock) in (None, b"x\n1\n1\n{}") and waiting(client) == 0, timeout=1 + BUSY
            )
        else:
            await task
        return task.cancelled()

    async def cancelled(lock, nth):
        await cancelled_at(what(lock, client), nth, late)

    nth = 0
    while True:
        nth += 1
        client.flushdb()
        if not asyncio.run(main(nth)):
            break
        assert nth < 100
    assert nth > least, "it waits more often than that"


@pytest.mark.parametrize("late", [False, True], ids=["when it begins to wait", "when it need not wait any longer"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "its connection was cut"])
def test_a_cancelled_release_has_been_sent(aclient, client, connected, late):
    async def main(nth):
        lock = AsyncLock(aclient, "a")
        task = asyncio.create_task(cycle(lock, nth))
        await asyncio.wait([task])
        await until(lambda: not client.exists(KEYS.lock), timeout=1 + BUSY)
        if task.cancelled():
            assert lock.lost is None
        else:
            await task
        return task.cancelled()

    async def cycle(lock, nth):
        await lock.acquire()
        if not connected:
            addresses = {found["addr"] for found in client.client_list()} - {client.client_info()["addr"]}
            for address in addresses:
                client.client_kill(address)
            await until(lambda: async_server_of(server_of(aclient))._commands.connection is None)
        try:
            await cancelled_at(lock.release(), nth, late)
        except asyncio.CancelledError:
            assert lock._leases == {}, "nothing is kept of it"
            raise

    nth = 0
    while True:
        nth += 1
        if not asyncio.run(main(nth)):
            break
    assert nth > (1 if connected else 2)


def test_what_the_server_comes_to_after_the_cancellation_is_undone(redis_url, client, proxy):
    async def main():
        behind = redis.asyncio.from_url(proxy.url)
        async with AsyncLock(behind, "a"):
            pass
        evals = client.info("commandstats").get("cmdstat_eval", {}).get("calls", 0)
        proxy.stall()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await AsyncLock(behind, "a", expire=60).acquire()
        proxy.heal()
        await until(lambda: client.info("commandstats").get("cmdstat_eval", {}).get("calls", 0) > evals)
        assert not client.exists(KEYS.lock)
        async with AsyncLock(behind, "a"):
            pass

    asyncio.run(main())


def test_a_timeout_around_acquire_takes_back_the_place_in_the_queue(aclient, client):
    async def main():
        lock = AsyncLock(aclient, "a")
        async with AsyncLock(aclient, "a"):
            await asyncio.create_task(impatient(lock))
            assert waiting(client) == 0
        async with asyncio.timeout(5), lock:
            pass

    async def impatient(lock):
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await lock.acquire()
        assert 0.2 <= time.monotonic() - started < 0.2 + BUSY

    asyncio.run(main())


@pytest.mark.processes
@pytest.mark.parametrize("connected", [True, False])
def test_in_a_black_hole_a_cancelled_task_is_back_within_a_second(client, proxy, connected):
    async def main():
        lock = AsyncLock(redis.asyncio.Redis(port=proxy.port, db=1), "a")  # it has to say which database it wants
        if connected:
            async with lock:
                pass
        proxy.black_hole()
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await lock.acquire()
        assert time.monotonic() - started < 1 + BUSY

    asyncio.run(main())


# Many


def test_tasks_threads_and_processes_are_served_first_come_first_served(aclient, client, redis_url, run_python):
    order, threads, tasks = [], [], []

    def thread(number):
        with Lock(client, "a", timeout=30):
            order.append(number)

    def process(number):
        waiter = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 30, {})
        waiter.wait_for(event="held")
        order.append(number)
        waiter.send()
        waiter.wait_for(event="released")

    async def task(number):
        async with AsyncLock(aclient, "a", timeout=30):
            order.append(number)

    async def main():
        async with AsyncLock(aclient, "a"):
            for number in range(9):
                if number % 3 == 0:
                    tasks.append(asyncio.create_task(task(number)))
                else:
                    threads.append(threading.Thread(target=(thread, process)[number % 3 - 1], args=(number,)))
                    threads[-1].start()
                await until(lambda: waiting(client) == number + 1, timeout=30)  # noqa: B023
        await asyncio.gather(*tasks)
        for other in threads:
            await asyncio.to_thread(other.join, 30)

    asyncio.run(main())
    assert order == list(range(9))


def test_a_thousand_waiting_tasks_use_one_blocked_connection(aclient, client):
    names = [f"lock {i}" for i in range(10)]
    served = []
    before = {found["id"] for found in client.client_list()}

    async def wait(number):
        name = names[number % 10]
        async with AsyncLock(aclient, name, timeout=60):
            served.append(number)

    async def main():
        holders = [AsyncLock(aclient, name, expire=120) for name in names]
        for holder in holders:
            await holder.acquire()
        tasks = [asyncio.create_task(wait(number)) for number in range(1000)]
        await until(lambda: sum(waiting(client, name) for name in names) == 1000, timeout=60)
        found = client.client_list()
        for holder in holders:
            await holder.release()
        await asyncio.gather(*tasks)
        return found

    mine = [found for found in asyncio.run(main()) if found["id"] not in before]
    assert sorted(int(found["sub"]) for found in mine) == [0, 1], "one for commands, one that listens"
    assert sorted(served) == list(range(1000))
    wait_until(lambda: {found["id"] for found in client.client_list()} <= before)


def test_a_crowd_that_finds_no_server_is_told_at_once(proxy):
    """All wait for the same attempt to connect, and not each for its own after the other's."""
    proxy.black_hole()
    client = redis.asyncio.Redis(port=proxy.port, db=1, socket_timeout=0.5)  # it has to say which database it wants

    async def main():
        started = time.monotonic()
        tasks = [asyncio.create_task(AsyncLock(client, f"lock {i}").acquire()) for i in range(50)]
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - started < 1 + BUSY
        assert {type(result) for result in results[1:]} == {LockBackendError}

    asyncio.run(main())


def test_who_opens_the_connection_for_all_may_be_cancelled_and_who_waits_for_it_too(aclient):
    async def main():
        tasks = [asyncio.create_task(AsyncLock(aclient, f"lock {i}").acquire()) for i in range(20)]
        await asyncio.sleep(0)
        tasks[1].cancel()  # who waits for the other one to open it
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[2:] == [True] * 18
        assert {type(result) for result in results[:2]} == {asyncio.CancelledError}

    asyncio.run(main())


def test_a_connection_that_fell_silent_is_left_and_what_was_asked_on_it_is_undone(redis_url, client):
    """The server does what it is told on that connection, but no answer comes."""
    aclient = redis.asyncio.from_url(redis_url, socket_timeout=1.5)

    async def main():
        async with AsyncLock(aclient, "a"):
            pass
        line = async_server_of(server_of(aclient))._commands.connection
        line.send_and_forget(encode_command(b"CLIENT", b"REPLY", b"OFF"))
        first = asyncio.create_task(AsyncLock(aclient, "a", expire=60).acquire())
        await until(lambda: client.exists(KEYS.lock))
        await asyncio.sleep(1)
        second = asyncio.create_task(AsyncLock(aclient, "b", expire=60).acquire())
        with pytest.raises(LockBackendError, match="no answer"):
            await first
        assert not second.done()
        async with asyncio.timeout(BUSY), AsyncLock(aclient, "c"):  # over another one
            pass
        with pytest.raises(LockBackendError, match="no answer"):
            await second
        await until(lambda: not client.exists(KEYS.lock, lock_keys("redislock", "b").lock), timeout=1 + BUSY)
        await asyncio.wait_for(asyncio.shield(line.lost), 1 + BUSY)

    asyncio.run(main())


# The event loop


def test_a_blocked_loop_loses_no_lock(aclient, client):
    async def main():
        async with AsyncLock(aclient, "a", expire=1.5) as lock:
            time.sleep(2)  # the fault
            lock.raise_if_lost()
            assert await lock.owned()

    asyncio.run(main())


def test_a_loop_that_was_blocked_does_not_call_the_server_silent(redis_url):
    async def main():
        lock = AsyncLock(redis.asyncio.from_url(redis_url, socket_timeout=0.3), "a")
        async with lock:
            pass
        task = asyncio.create_task(hold(lock))
        await asyncio.sleep(0)  # it has sent its command
        time.sleep(1)  # the fault
        assert await task

    asyncio.run(main())


def test_loops_one_after_the_other_leave_no_connection(aclient, client):
    lock = AsyncLock(aclient, "a")

    async def main():
        async with lock:
            task = asyncio.create_task(hold(lock))
            await until(lambda: waiting(client) == 1)
        assert await task

    before = len(client.client_list())
    for _ in range(5):
        asyncio.run(main())
        async_to_sync(main)()
    wait_until(lambda: len(client.client_list()) <= before)


def test_an_ended_loop_is_not_kept(aclient):
    ended = []

    async def main():
        ended.append(weakref.ref(asyncio.get_running_loop()))
        async with AsyncLock(aclient, "a"):
            pass

    for _ in range(3):
        asyncio.run(main())
    gc.collect()
    assert [loop() for loop in ended[:-1]] == [None, None]


def test_loops_in_several_threads_at_once_share_one_lock(aclient, client):
    lock, inside, most = AsyncLock(aclient, "a"), [], []

    async def work():
        async with lock:
            inside.append(1)
            most.append(len(inside))
            await asyncio.sleep(0.001)
            inside.pop()

    async def main():
        await asyncio.gather(*[work() for _ in range(10)])

    before = len(client.client_list())
    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert most == [1] * 50
    wait_until(lambda: len(client.client_list()) <= before)


ENDINGS = {
    "idle": """
async def main():
    async with AsyncLock(client, "a"):
        pass
    await AsyncLock(client, "a").acquire()
""",
    "waiting tasks": """
async def main():
    holder = AsyncLock(client, "a")
    await holder.acquire()
    tasks.extend(asyncio.create_task(AsyncLock(client, "a").acquire()) for _ in range(5))
    while (await holder.owner()).waiting < 5:
        await asyncio.sleep(0.01)
""",
    "a task that is connecting": """
async def main():
    tasks.append(asyncio.create_task(AsyncLock(client, "a").acquire()))
    await asyncio.sleep(0)
""",
    "a generator that holds": """
async def held():
    async with AsyncLock(client, "b"), AsyncLock(client, "c"):
        yield

async def main():
    tasks.append(held())
    await anext(tasks[0])
    async with AsyncLock(client, "a"):
        pass
""",
    "a failing main": """
async def main():
    await AsyncLock(client, "a").acquire()
    tasks.append(asyncio.create_task(AsyncLock(client, "a").acquire()))
    await asyncio.sleep(0.05)
    raise ZeroDivisionError
""",
}
ENDING = """
import asyncio, gc, logging, redis.asyncio
from django_redislock.core import AsyncLock
client = redis.asyncio.from_url(args[0])
logging.getLogger("django_redislock").setLevel("ERROR")
for _ in range(3):
    tasks = []
    {}
    try:
        asyncio.run(main())
    except ZeroDivisionError:
        pass
    tasks = None
    gc.collect()
    asyncio.run(AsyncLock(client, "a").reset())
say(event="done")
"""


@pytest.mark.processes
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_a_loop_is_a_clean_one(client, redis_url, run_python, ending):
    code = ENDING.format(ENDINGS[ending].replace("\n", "\n    "))
    before = len(client.client_list())
    process = run_python(code, redis_url, env={"PYTHONDEVMODE": "", "PYTHONWARNINGS": "always"})
    process.wait_for(event="done")
    process.finish()
    assert process.errors == ""
    assert not client.keys("*:queue:*")
    assert not client.exists(lock_keys("redislock", "b").lock, lock_keys("redislock", "c").lock)
    wait_until(lambda: len(client.client_list()) <= before)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(("kind", "entries"), [(AsyncLock, 1), (AsyncRLock, 2)])
def test_a_forked_child_owns_nothing_of_its_parents(aclient, client, kind, entries):
    async def main():
        lock = kind(aclient, "a", expire=2.4)
        async with AsyncExitStack() as blocks:
            for _ in range(entries):
                await blocks.enter_async_context(lock)
            waiter = asyncio.create_task(hold(kind(aclient, "a")))
            await until(lambda: waiting(client) == 1)
            in_a_fork(lambda: asyncio.run(child(lock)))
            await asyncio.sleep(2.6)
            assert await lock.owned(), "the parent keeps and renews its lock"
        assert await waiter

    async def child(lock):
        with pytest.raises(NotAcquired):
            await lock.release()
        for mine in (lock, kind(aclient, "a")):
            assert not await mine.acquire(blocking=False), "not inside"
            assert not await mine.acquire(timeout=0.1)
        for _ in range(entries):  # it leaves its copies of its parent's blocks
            await lock.__aexit__(None, None, None)
        assert await lock.locked()
        async with kind(aclient, "b"):
            pass

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_runs_the_loop_of_its_parent_has_connections_of_its_own(aclient, client):
    async def cycle():
        async with AsyncLock(aclient, "a"):
            return async_server_of(server_of(aclient))

    loop = asyncio.new_event_loop()
    mine = loop.run_until_complete(cycle())

    def child():
        assert loop.run_until_complete(cycle()) is not mine

    in_a_fork(child)
    assert loop.run_until_complete(cycle()) is mine
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def test_a_cycle_is_two_commands_and_a_contended_one_at_most_four(aclient, client):
    async def cycle():
        for _ in range(10):
            async with AsyncLock(aclient, "a"):
                pass

    async def main():
        await cycle()
        with counting(client) as alone:
            await cycle()
        with counting(client) as together:
            await asyncio.gather(*[cycle() for _ in range(4)])
        return alone["evalsha"], together["evalsha"]

    alone, together = asyncio.run(main())
    assert alone == 20
    assert together <= 40 * 4


def test_values_can_be_computed_by_tasks(aclient, client):
    """The steps of the cache ask for one more thing to be done."""
    server, calls = server_of(aclient), []

    async def compute():
        calls.append(1)
        await asyncio.sleep(0.05)
        return "v"

    def want():
        return ValueRequest(
            *(server, "redislock", "k", compute, lambda value: (pickle.dumps(value), 60000), pickle.loads),
            expire=10,
            auto_renewal=False,
            max_hold=None,
            forgiving=False,
        )

    async def get():
        here = async_server_of(server)
        return (await here.run(fly(want(), asyncio.current_task(), math.inf, here.room.open))).value

    async def main():
        assert await asyncio.gather(*[get() for _ in range(5)]) == ["v"] * 5

    asyncio.run(main())
    assert calls == [1]


# The facade


def test_alock_takes_client_and_defaults_from_the_settings(client):
    async def main():
        async with alock("a", label="invoice") as lock:
            holder = await lock.owner()
            assert (holder.expire, holder.label, holder.auto_renewal) == (7, "invoice", False)
            with pytest.raises(AcquireTimeout) as caught:
                await hold(alock("a"))
            assert caught.value.timeout == 0.1
            assert not await alock("a", blocking=False).acquire(blocking=False)
            assert not Lock(client, "a", prefix="mine").acquire(blocking=False)
        async with alock("a", expire=9, auto_renewal=True, timeout=3) as lock:
            holder = await lock.owner()
            assert (holder.expire, holder.auto_renewal) == (9, True)

    with override_settings(DJANGO_REDISLOCK={"EXPIRE": 7, "AUTO_RENEWAL": False, "TIMEOUT": 0.1, "KEY_PREFIX": "mine"}):
        asyncio.run(main())


def test_disabled_everything_runs_unlocked(own_server):
    async def main():
        async with alock("a", timeout=1) as one, alock("a") as two:
            assert two.fence >= one.fence > 0
            assert await alock("a").acquire()
            assert (await one.owner()).fence == one.fence
            await one.extend()
            one.raise_if_lost()

    with override_settings(DJANGO_REDISLOCK={"ENABLED": False, "URL": "redis://127.0.0.1:1/0"}):
        asyncio.run(main())

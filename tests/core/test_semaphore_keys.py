"""The keys of slots: they are text, and no lock has the name of a slot."""

from __future__ import annotations

from contextlib import suppress

import pytest

from django_redislock.celery.execution_lock import AfterRelease, Delivery, ExecutionLock
from django_redislock.core import AsyncSemaphore, Lock, Semaphore, held_locks
from django_redislock.core.keys import lock_keys, slots_keys
from django_redislock.exceptions import LockLost
from tests.support import begin, client_at, wait_until
from tests.support.tasks import lock_for_threads

KEYS = slots_keys("redislock", "crm", 3)


@pytest.fixture(params=["thread", "task"])
def make(request):
    """``make(client, name, limit, …)``: a Semaphore, or an AsyncSemaphore that is used like one."""
    if request.param == "thread":
        return Semaphore
    return lock_for_threads(request.getfixturevalue("tasks"), AsyncSemaphore)


def test_every_key_is_text_while_slots_are_used_and_afterwards(make, client, redis_url):
    """A scan by another program raised UnicodeDecodeError, and redis-py's moving of a slot did not end."""
    task = ExecutionLock(client, "any").with_name(
        "celery:t", limit=2, delivery=Delivery("task", "task:0:x", known=True)
    )
    task.ending = AfterRelease("done", 30)
    with client_at(redis_url, decode_responses=True) as other:

        def see():
            for key in list(other.scan_iter(count=1000)):
                if other.type(key) == "zset":  # the index and the queue have the names, too
                    other.zrange(key, 0, -1)
            return True

        one = make(client, "crm", 2)
        assert one.acquire()
        with make(client, "crm", 2), task:
            waiter = begin(make(client, "crm", 2).acquire, timeout=20)
            wait_until(lambda: client.zcard(KEYS.queue))
            assert see()
            one.reset(fence=one.fence, by="olga", reason="stuck")
            assert see()
            with suppress(LockLost):
                one.release()
        assert waiter.result(20)
        assert see()


@pytest.mark.parametrize("name", ["slot:crm:1", "slot:crm:", "slot:", "slot:crm:1:lock", "crm:1", "slot", "\0"])
def test_no_lock_has_the_key_or_the_listed_name_of_a_slot(make, client, name):
    with make(client, "crm", 2, label="slot"), make(client, name, 2, label="other"), Lock(client, name) as lock:
        assert not Lock(client, name).acquire(blocking=False)
        found = sorted((info.name, info.slot) for info in held_locks(client))
        assert found == sorted([("crm", 1), (name, 0), (name, 1)])
        assert lock.owner().name == name
        assert lock_keys("redislock", name).lock not in (KEYS.lock, *KEYS.others, KEYS.queue)
        lock.extend()
        lock.raise_if_lost()
    assert list(held_locks(client)) == []


def test_a_slot_of_an_earlier_version_in_an_index_is_passed_over(client):
    with Semaphore(client, "crm", 2):
        client.zadd(KEYS.held, {b"crm\xff2": 9e15, b"slot:": 9e15, b"slot:crm:two": 9e15, b"slot:\xff:1": 9e15})
        assert [(info.name, info.slot) for info in held_locks(client)] == [("crm", 1)]


def test_a_lock_and_a_semaphore_of_one_name_do_not_exclude_each_other(make, client):
    with Lock(client, "crm"), make(client, "crm", 1) as held:
        assert not Semaphore(client, "crm", 1).acquire(blocking=False)
        assert len(held.holders()) == 1

"""Waiters whose queue the server lost: they come back together, with the first one that looks by itself."""

from __future__ import annotations

import threading

import pytest

from django_redislock.core import AsyncSemaphore, Lock, Semaphore, operations
from django_redislock.core.driver.wakeups import Waiters
from django_redislock.core.keys import slots_keys
from tests.support import begin, begin_to_wait, enter, queue_of, queued, wait_until
from tests.support.tasks import lock_for_threads

WAITERS, SLOTS = 20, 5


@pytest.fixture
def one_look(monkeypatch):
    """From now on the waiters of each room look by themselves once, when this is set, and then never again."""
    looks, look = threading.Event(), Waiters.wake_pollers
    done = set()

    def wake_pollers(self):
        if looks.is_set() and self not in done:
            done.add(self)
            look(self)

    monkeypatch.setattr(Waiters, "wake_pollers", wake_pollers)
    monkeypatch.setattr(operations, "MAX_SLEEP", 600.0)
    return looks


@pytest.fixture(params=["thread", "task"])
def make_semaphore(request):
    if request.param == "thread":
        return Semaphore
    return lock_for_threads(request.getfixturevalue("tasks"), AsyncSemaphore)


def test_when_the_queue_is_evicted_all_waiters_are_in_it_again_after_one_look(make_lock, client, one_look):
    holder = Lock(client, "a", expire=600)
    holder.acquire()
    served = []

    def wait(number):
        with make_lock(client, "a", timeout=60):
            served.append(number)

    calls = [begin_to_wait(client, "a", wait, number) for number in range(WAITERS)]
    client.delete(queue_of("a"))
    one_look.set()
    wait_until(lambda: queued(client, "a") == WAITERS)
    holder.release()
    for call in calls:
        call.result(30)
    assert served == sorted(served), "each has its place"


def test_when_all_data_is_lost_all_waiters_are_served_after_one_look(make_lock, client, one_look):
    holder = Lock(client, "a", expire=600, auto_renewal=False)
    holder.acquire()
    served = []

    def wait(number):
        with make_lock(client, "a", timeout=60):
            served.append(number)

    calls = [begin_to_wait(client, "a", wait, number) for number in range(WAITERS)]
    client.flushdb()
    one_look.set()
    for call in calls:
        call.result(30)
    assert len(served) == WAITERS


def test_when_all_data_is_lost_the_slots_of_a_semaphore_are_taken_at_once(make_semaphore, client, one_look):
    holders = [Semaphore(client, "a", SLOTS, expire=600, auto_renewal=False) for _ in range(SLOTS)]
    for holder in holders:
        holder.acquire()
    together = threading.Barrier(SLOTS)

    def wait():
        with make_semaphore(client, "a", SLOTS, timeout=60):
            together.wait(30)  # broken if they come one by one

    calls = [begin(wait) for _ in range(WAITERS)]
    wait_until(lambda: client.zcard(slots_keys("redislock", "a", SLOTS).queue) == WAITERS)
    client.flushdb()
    one_look.set()
    for call in calls:
        call.result(60)


def test_when_the_clock_steps_all_waiters_are_served_after_one_look(make_lock, clock, one_look):
    with clock.client() as client:
        holder = Lock(client, "a", expire=600, auto_renewal=False)
        holder.acquire()

        def wait():
            with make_lock(client, "a", timeout=60):
                pass

        calls = [begin_to_wait(client, "a", wait) for _ in range(WAITERS)]
        clock.jump(3600)
        one_look.set()
        for call in calls:
            call.result(30)


def test_a_look_that_finds_its_place_wakes_nobody(make_lock, client, one_look):
    def calls(command):
        return client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]

    with Lock(client, "a", expire=600):
        waiting = [begin_to_wait(client, "a", enter, make_lock(client, "a", timeout=60)) for _ in range(WAITERS)]
        published, called = calls("publish"), calls("evalsha")
        one_look.set()
        wait_until(lambda: calls("evalsha") > called)
        assert calls("publish") == published
    for each in waiting:
        each.result(30)

"""The semaphore: at most so many holders, in one order over all slots, with the lock's renewal, fences and losses."""

from __future__ import annotations

import threading
import time

import pytest

from django_redislock.core import AsyncSemaphore, Semaphore, held_locks
from django_redislock.core.driver import wakeups_tasks, wakeups_threads
from django_redislock.core.keys import slots_keys
from django_redislock.exceptions import AcquireTimeout, AlreadyAcquired, LockBackendError, LockLost, NotAcquired
from tests.support import (
    BUSY,
    begin,
    counting,
    in_thread,
    in_threads,
    lived,
    wait_until,
    wait_until_renewed,
)
from tests.support.semaphores import most_at_once, take_turns
from tests.support.tasks import lock_for_threads

KEYS = slots_keys("redislock", "crm", 3)


def slot_key(number):
    return KEYS.slot(number).lock


def queued(client):
    return client.zcard(KEYS.queue)


@pytest.fixture(params=["thread", "task"])
def make(request):
    """``make(client, name, limit, …)``: a Semaphore, or an AsyncSemaphore that is used like one."""
    if request.param == "thread":
        return Semaphore
    return lock_for_threads(request.getfixturevalue("tasks"), AsyncSemaphore)


def begin_to_take(make, client, got, numbers, limit=2, **options):
    """Begin waits for a slot one after another, each of which notes its number and fence when it has one."""

    def take(number):
        with make(client, "crm", limit, timeout=60, **options) as held:
            got.append((number, held.fence))

    calls, before = [], queued(client)
    for number in numbers:
        calls.append(begin(take, number))
        wait_until(lambda: queued(client) == before + len(calls))
    return calls


def join(calls):
    for call in calls:
        call.result(60)


# At most so many


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_as_many_callers_as_the_limit_says_get_a_slot_and_no_more(make, client, limit):
    slots = [make(client, "crm", limit) for _ in range(limit)]
    assert all(slot.acquire(blocking=False) for slot in slots)
    fences = [slot.fence for slot in slots]
    assert fences == sorted(set(fences))
    other = make(client, "crm", limit)
    assert not other.acquire(blocking=False)
    assert other.locked()
    slots[limit // 2].release()
    assert other.acquire(blocking=False)
    assert other.fence > fences[-1]
    assert len(other.holders()) == limit
    for slot in {*slots, other} - {slots[limit // 2]}:
        slot.release()
    assert not other.locked()
    assert client.keys("*:lock:*") == []


def test_a_free_slot_costs_two_commands_for_the_whole_cycle(make, client):
    with make(client, "crm", 20):
        pass
    with counting(client) as counts, make(client, "crm", 20):
        pass
    assert counts["evalsha"] == 2


def test_a_timeout_is_kept_and_leaves_no_place_in_the_queue(make, client):
    holders = [Semaphore(client, "crm", 2) for _ in range(2)]
    assert all(holder.acquire() for holder in holders)
    began = time.monotonic()
    with pytest.raises(AcquireTimeout) as caught, make(client, "crm", 2, timeout=0.4):
        raise AssertionError("the block ran")
    assert 0.4 <= time.monotonic() - began < 0.5 + BUSY
    assert (caught.value.name, caught.value.timeout) == ("crm", 0.4)
    assert queued(client) == 0


@pytest.mark.processes
def test_of_32_processes_at_most_four_hold_a_slot_and_all_come_to_their_turn(client, redis_url, run_python):
    process = run_python(take_turns, redis_url, "crm", 4, 32, 5)
    process.finish()
    spans = [tuple(map(float, each.split())) for each in client.lrange("spans", 0, -1)]
    assert len(spans) == 32 * 5
    assert most_at_once(spans) == 4
    fences = [fence for *_, fence in spans]
    assert len(set(fences)) == len(fences)


# Order


def test_slots_go_to_the_waiters_in_the_order_in_which_they_came(make, client):
    got = []
    holders = [Semaphore(client, "crm", 2) for _ in range(2)]
    assert all(holder.acquire() for holder in holders)
    calls = begin_to_take(make, client, got, range(6))
    holders[1].release()
    join(calls)
    assert [number for number, _ in got] == list(range(6))
    assert sorted(got, key=lambda each: each[1]) == got
    holders[0].release()


def test_a_newcomer_does_not_overtake_a_waiter_at_a_free_slot(make, client, monkeypatch):
    for room in (wakeups_threads, wakeups_tasks):
        monkeypatch.setattr(room, "POLL_INTERVAL", 60)  # the waiter does not look by itself
    got = []
    holders = [Semaphore(client, "crm", 2) for _ in range(2)]
    assert all(holder.acquire() for holder in holders)
    calls = begin_to_take(make, client, got, [0])
    client.delete(slot_key(1))  # nobody hands it over
    newcomer = Semaphore(client, "crm", 2)
    assert not newcomer.acquire(blocking=False)
    join(calls)
    assert [number for number, _ in got] == [0]


@pytest.mark.parametrize(
    "left", [None, b"of a frozen process\n0\n1\nchannel"], ids=["expired", "reserved and not claimed"]
)
def test_who_gets_a_slot_wakes_a_waiter_for_each_other_slot_that_nobody_released(make, client, monkeypatch, left):
    """The twenty slots of a killed process went to the waiters one by one, with each poll."""
    for room in (wakeups_threads, wakeups_tasks):
        monkeypatch.setattr(room, "POLL_INTERVAL", 60)  # no waiter looks by itself
    inside = threading.Barrier(3)
    holders = [Semaphore(client, "crm", 3) for _ in range(3)]
    assert all(holder.acquire() for holder in holders)

    def wait():
        with make(client, "crm", 3, timeout=60):
            inside.wait(30)  # all three are inside at once

    calls = [begin(wait) for _ in range(3)]
    wait_until(lambda: queued(client) == 3)
    for number in (1, 2, 3):
        client.delete(slot_key(number)) if left is None else client.set(slot_key(number), left)
    (first,) = client.zrange(KEYS.queue, 0, 0)
    client.publish(*first.split(b"\n", 1))
    join(calls)


def test_each_of_several_free_slots_goes_to_a_waiter_of_its_own(make, client):
    got, inside = [], threading.Barrier(3)
    holders = [Semaphore(client, "crm", 3) for _ in range(3)]
    assert all(holder.acquire() for holder in holders)

    def wait():
        with make(client, "crm", 3, timeout=60) as held:
            got.append(held.fence)
            inside.wait(30)  # all three are inside at once

    calls = [begin(wait) for _ in range(3)]
    wait_until(lambda: queued(client) == 3)
    for holder in holders:
        holder.release()
    join(calls)
    assert len(set(got)) == 3


# Holders that fail


def test_a_slot_whose_holder_does_not_renew_is_free_after_its_expiry(make, client):
    keeper, dead = Semaphore(client, "crm", 2), Semaphore(client, "crm", 2, expire=0.6, auto_renewal=False)
    assert keeper.acquire()
    assert dead.acquire()
    began = time.monotonic()
    with make(client, "crm", 2, timeout=30):
        assert time.monotonic() - began < 1.6 + BUSY
        with pytest.raises(LockLost):
            dead.raise_if_lost()
        keeper.raise_if_lost()


def test_a_slot_is_renewed_and_keeps_its_number(make, client):
    with make(client, "crm", 2, expire=30) as other, make(client, "crm", 2, expire=30) as held:
        for slot, key in ((other, slot_key(1)), (held, slot_key(2))):
            assert client.pexpire(key, 15_000)
            wait_until_renewed(slot)
            assert 15_000 < client.pttl(key) <= 30_000
        held.raise_if_lost()
        assert held.owned()
        assert 15 < held.ttl() <= 30
        held.extend(90)
        assert held.ttl() > 50


def test_a_forced_release_ends_the_acquisition_of_that_fence_only(make, client):
    one, two = make(client, "crm", 2, expire=0.6), make(client, "crm", 2, expire=0.6)
    assert one.acquire()
    assert two.acquire()
    assert Semaphore(client, "crm", 2).reset(fence=two.fence, by="olga", reason="stuck")
    wait_until(lambda: two.lost)
    assert (two.lost.code, "olga" in two.lost.reason) == ("force_released", True)
    one.raise_if_lost()
    assert Semaphore(client, "crm", 2).reset()
    assert not Semaphore(client, "crm", 2).reset()
    with pytest.raises(LockLost):
        one.release()


def test_an_id_releases_and_extends_its_slot_in_another_object(make, client):
    first, second = make(client, "crm", 2), make(client, "crm", 2)
    assert first.acquire()
    assert second.acquire()
    elsewhere = make(client, "crm", 2, id=second.id)
    elsewhere.extend(60)
    assert second.ttl() > 50
    elsewhere.release()
    elsewhere.release()
    assert [holder.fence for holder in first.holders()] == [first.fence]
    first.release()
    with pytest.raises(LockLost):
        second.release()


@pytest.mark.slow
def test_an_only_slot_that_is_extended_by_its_id_stays_in_the_list(make, client):
    held = make(client, "crm", 1, expire=1, auto_renewal=False)
    assert held.acquire()
    elsewhere = make(client, "crm", 1, id=held.id)
    elsewhere.extend(60)
    lived(1.2)  # the end of the expiry that the list knew
    assert [(info.name, info.slot) for info in held_locks(client)] == [("crm", 1)]
    elsewhere.release()
    assert client.zcard(KEYS.held) == 0


# Two limits


def test_the_larger_limit_counts_and_slots_above_a_lowered_one_end_with_their_holders(make, client):
    before = [make(client, "crm", 3) for _ in range(3)]
    assert all(slot.acquire() for slot in before)
    assert not make(client, "crm", 2).acquire(blocking=False)
    before[0].release()
    lowered = make(client, "crm", 2)
    assert lowered.acquire(blocking=False)
    before[2].release()  # the third slot
    assert not make(client, "crm", 2).acquire(blocking=False)
    assert not client.exists(slot_key(3))
    with make(client, "crm", 3, timeout=0):
        assert client.exists(slot_key(3))


def test_a_slot_above_the_limit_of_the_first_waiter_goes_to_the_next_that_may_have_it(make, client):
    got = []
    holders = [Semaphore(client, "crm", 3) for _ in range(3)]
    assert all(holder.acquire() for holder in holders)
    small = begin_to_take(make, client, got, [2], limit=2)
    large = begin_to_take(make, client, got, [3], limit=3)
    began = time.monotonic()
    holders[2].release()
    join(large)
    assert time.monotonic() - began < 0.3 + BUSY
    assert [number for number, _ in got] == [3]
    assert queued(client) == 1
    holders[1].release()
    join(small)
    assert [number for number, _ in got] == [3, 2]


def test_a_waiter_whose_process_also_waits_with_a_lower_limit_gets_a_slot_that_nobody_released(make, client):
    """The first waiter of a process looks for the others; in a simulated history it did not see their slots."""
    got = []
    keeper, dead = Semaphore(client, "crm", 1), Semaphore(client, "crm", 2, expire=0.5, auto_renewal=False)
    assert keeper.acquire()
    small = begin_to_take(make, client, got, [1], limit=1)
    assert dead.acquire()
    began = time.monotonic()
    join(begin_to_take(make, client, got, [2], limit=2))
    assert time.monotonic() - began < 1.5 + BUSY
    assert [number for number, _ in got] == [2]
    keeper.release()
    join(small)


# The caller itself


def test_a_caller_gets_another_slot_through_another_object_and_an_error_when_it_has_them_all(make, client):
    with make(client, "crm", 2), make(client, "crm", 2):
        with pytest.raises(AlreadyAcquired, match="no semaphore"), make(client, "crm", 2):
            raise AssertionError("the block ran")
        assert not make(client, "crm", 2).acquire(timeout=0.1)


def test_a_caller_waits_for_a_slot_that_another_thread_holds(make, client):
    other = Semaphore(client, "crm", 2)
    threading.Thread(target=other.acquire).start()
    wait_until(lambda: client.exists(slot_key(1)))

    def wait():  # in a thread that believes to hold no slot of an earlier test
        with make(client, "crm", 2):
            threading.Timer(0.3, other.reset, kwargs={"fence": other.holders()[0].fence}).start()
            with make(client, "crm", 2) as second:
                return second.fence

    assert in_thread(wait)


def test_one_object_is_shared_by_threads(client):
    shared, at_once, inside = Semaphore(client, "crm", 2, timeout=60), [], []

    def enter(number):
        for _ in range(5):
            with shared as held:
                inside.append(held.fence)
                at_once.append(len(inside))
                inside.remove(held.fence)

    in_threads(6, enter)
    assert len(at_once) == 30
    assert max(at_once) <= 2


def test_who_holds_nothing_can_release_nothing(make, client):
    stranger = make(client, "crm", 2, id="nobody")
    for operation in (make(client, "crm", 2).release, stranger.release, stranger.extend):
        with pytest.raises(NotAcquired):
            operation()


# Bad input


@pytest.mark.parametrize("kind", [Semaphore, AsyncSemaphore])
@pytest.mark.parametrize("limit", [0, -1, 101, 10**9, 1.5, True, "3", None])
def test_a_wrong_limit_is_refused(kind, client, limit):
    error = ValueError if type(limit) is int else TypeError
    with pytest.raises(error, match="limit must be"):
        kind(client, "crm", limit)


def test_a_value_that_no_semaphore_wrote_is_refused_by_its_key(make, client):
    client.set(slot_key(2), "something")
    with pytest.raises(LockBackendError, match="no lock wrote"), make(client, "crm", 2), make(client, "crm", 2):
        raise AssertionError("the block ran")
    client.delete(slot_key(2))
    client.rpush(slot_key(2), "something")
    with pytest.raises(LockBackendError, match="WRONGTYPE"), make(client, "crm", 2), make(client, "crm", 2):
        raise AssertionError("the block ran")
    assert client.lrange(slot_key(2), 0, -1)


@pytest.mark.parametrize("kind", [Semaphore, AsyncSemaphore])
def test_a_semaphore_is_not_reentrant_and_takes_no_token(client, kind):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got an unexpected keyword argument 'reentrant'$"):
        kind(client, "crm", 2, reentrant=True)
    with pytest.raises(TypeError, match="token"):
        Semaphore(client, "crm", 2).acquire(token="mine")

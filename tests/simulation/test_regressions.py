"""What the simulation found in the package, told again on a real server, or as the small history that it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from django_redislock.celery.execution_lock import FINISH
from django_redislock.core import scripts
from django_redislock.core.driver.effects import Script
from django_redislock.core.keys import lock_keys, undone_key
from django_redislock.exceptions import LockBackendError
from tests.simulation.cache import Change, Get
from tests.simulation.explore import failure_of
from tests.simulation.locks import Round
from tests.simulation.nested import GetNested
from tests.simulation.quorum import Round as QuorumRound
from tests.simulation.worker import Publish
from tests.simulation.world import Fault, Plan, ThreadPlan
from tests.support import wait_until
from tests.support.locks import RLock, listening

KEYS = lock_keys("redislock", "a")


def run(client: redis.Redis, script: Script, keys: tuple[bytes, ...], *args: bytes) -> Any:
    return client.eval(script.text, len(keys), *keys, *args)


def test_a_given_id_that_takes_its_turn_in_the_place_of_another_caller_leaves_no_place_in_the_queue(client, listen):
    """Two processes wait by one id. The lock is reserved for the first, the second takes it: its own place is to go,
    too, or the next release would reserve the lock for nobody."""
    listen("one", "two")

    def acquire(id: bytes, channel: bytes) -> Any:
        return run(
            client,
            scripts.ACQUIRE,
            (*KEYS[:4], undone_key(KEYS, id), KEYS.receipts),
            id,
            b"60000",
            b"a",
            b"{}",
            channel,
            b"1" if channel else b"0",
            b"",
        )

    assert acquire(b"holder", b"") > 0
    assert isinstance(acquire(b"given", b"one"), list)
    assert isinstance(acquire(b"given", b"two"), list)
    of_lock = KEYS.lock, KEYS.held, KEYS.queue, KEYS.receipts
    run(client, scripts.RELEASE, of_lock, b"holder", b"a", b"", b"", b"id holder")
    assert acquire(b"given", b"two") > 0
    assert client.zrange(KEYS.queue, 0, -1) == []


def test_who_waits_by_the_id_by_which_another_caller_releases_is_woken(client):
    """Both were given the id. Without the message the waiter would look half a second later."""
    value = b"given\n7\n0\n{}"
    client.set(KEYS.lock, value)
    client.zadd(KEYS.queue, {b"one\ngiven": 1})
    with listening(client, "one") as heard:
        of_lock = KEYS.lock, KEYS.held, KEYS.queue, KEYS.receipts
        run(client, scripts.RELEASE, of_lock, b"given", b"a", b"", b"7", b"7")
        assert heard() == ["given"]
    assert client.get(KEYS.lock).startswith(b"given\n0\n")


@pytest.mark.parametrize("careful", [b"", b"1"])
@pytest.mark.parametrize(
    ("before", "mark", "after"),
    [
        (None, b"2", b"2"),
        (b"1", b"2", b"2"),
        (b"3", b"2", b"3"),
        (b"done", b"2", b"done"),
        (b"done:claim", b"2", b"done:claim"),
        (b"ending", b"2", b"ending"),
        (b"ending:claim", b"2", b"2"),
        (b"7", b"done", b"done"),
    ],
)
def test_a_late_mark_that_a_message_was_published_again_does_not_undo_that_a_copy_has_ended(
    client, before, mark, after, careful
):
    """The call was on its way for longer than the expiry of the claim before it. A copy ran meanwhile and has ended."""
    if before is not None:
        client.set("marker", before)
    verb, more = (b"done", ()) if mark == b"done" else (b"again", (mark, careful))
    run(client, FINISH, (b"marker",), verb, b"60000", *[b""] * 6, *more)
    assert client.get("marker") == (before if careful and before == b"ending:claim" else after)


@pytest.mark.slow
def test_a_re_entrant_lock_whose_release_got_no_answer_is_watched_again_when_it_is_entered_again(client, proxy):
    """The release was the last of its block, so the next block is the only one: its end releases."""
    lock = RLock(redis.Redis.from_url(proxy.url, socket_timeout=0.5), "a", expire=3)
    lock.acquire()
    proxy.black_hole()
    with pytest.raises(LockBackendError):
        lock.release()
    proxy.heal()
    lock.acquire()
    lease = lock._require_lease(threading.current_thread())
    deadline = lease.deadline
    wait_until(lambda: lease.deadline > deadline, 10, "the watchdog renews it")
    lock.release()
    assert client.exists(KEYS.lock) == 0


def renewed(expire: float) -> dict[str, Any]:
    return {"expire": expire, "auto_renewal": True}


def test_an_extension_whose_answer_comes_after_the_deadline_keeps_nobody_out():
    """It arrived in time, so the lock lasted as long as it had asked, though its holder had been told of the loss."""
    own, shorter = {"expire": 1.0, "auto_renewal": False}, {"expire": 0.3, "auto_renewal": False}
    threads = [
        ThreadPlan(0, 0.22530945133864524, own, [Round(None, 0.9975859949884618, 0.5, False, 1, 0.0)]),
        ThreadPlan(
            1,
            0.022534424960324807,
            shorter,
            [Round(2.0, 0.7739590181592014, None, False, 1, 0.0), Round(None, 0.9104583523121383, None, False, 1, 0.1)],
        ),
    ]
    plan = Plan(110056406, 2, threads, fates={}, options={"min_to_write": False})
    assert failure_of("replicas", plan) is None


def test_a_subscription_that_fails_just_before_it_is_used_is_tried_again():
    """The slot had moved to a node where the process had none."""
    threads = [
        ThreadPlan(0, 0.29581445638189147, renewed(1.0), [Round(None, 3.8724111300042443, None, False, 1, 0.0)]),
        ThreadPlan(
            1,
            0.0011888239690418523,
            renewed(0.3),
            [
                Round(0.4, 3.4600716867293078, 0.5, False, 1, 0.1),
                Round(None, 2.3551148607814034, None, False, 1, 0.001),
            ],
        ),
        ThreadPlan(
            1,
            0.008073130680185803,
            renewed(3.0),
            [
                Round(0.0, 0.9704623074835022, None, False, 1, 0.001),
                Round(None, 2.5164974215909086, None, False, 1, 0.0),
            ],
        ),
    ]
    faults = [
        Fault(7.506983009253167, "cut", 1, 0.3),
        Fault(1.093310203710618, "move", 0, 0.002),
        Fault(4.394322454111131, "move", 0, 1.0),
        Fault(3.725421907944905, "silence", 0, 4.0),
    ]
    lost = {
        (17, 1): "refused",
        (33, 1): "slow",
        (17, 11): "refused",
        (33, 5): "late",
        (33, 7): "late",
        (33, 10): "lost",
    }
    plan = Plan(100053463, 3, threads, faults, faulty_until=12.0, fates=lost)
    assert failure_of("cluster", plan) is None


def test_an_entry_that_arrives_after_a_later_extension_does_not_cut_it_short():
    """The inner acquisition was sent twice, and the first try arrived after the lock had been extended to twice its
    expiry. Then Redis had an earlier end than the holder believed."""
    threads = [
        ThreadPlan(1, 0.22948612843905622, renewed(1.0), [Round(None, 0.1020750187543173, 2.0, False, 2, 0.001)]),
        ThreadPlan(1, 0.18360372235033656, renewed(3.0), [Round(None, 2.9845915421772196, None, True, 1, 0.0)]),
        ThreadPlan(2, 0.007707633861646168, renewed(1.0), [Round(2.0, 0.8850770694408659, None, False, 1, 0.001)]),
    ]
    fates = {3: "refused", 5: "lost", 7: "refused", 10: "late", 12: "unknown", 13: "slow", 14: "refused", 16: "lost"}
    plan = Plan(220051882, 3, threads, faulty_until=12.0, fates={(1, number): fate for number, fate in fates.items()})
    assert failure_of("rlock", plan) is None


def test_an_execution_whose_release_is_answered_after_its_deadline_is_not_told_of_a_loss():
    """Its process was frozen when it had sent the release, which the server executed in time."""
    publish = Publish("k", ((0.0, 1),), 0.77, 0, None, False, 0.0)
    options = {"scope": "run", "policy": "skip", "late": True, "expire": 0.6}
    freeze = Fault(0.8824943613033245, "freeze", 1, 5.840950576125311)
    threads = [ThreadPlan(0, 0.04373976243195144, {}, [publish])]
    plan = Plan(1798, 2, threads, [freeze], faulty_until=12.0, fates={}, options=options)
    assert failure_of("celery", plan) is None


def test_a_lock_that_is_kept_for_a_retry_is_not_cut_short_by_a_late_call_of_its_publisher():
    """The record of the kept lock had the expiry of the run in it, and no call sets a later end than that."""
    threads = [
        ThreadPlan(0, 0.28, {}, [Publish("k", ((1.69, 0), (0.305, 1)), 0.177, 2, None, False, 2.0)]),
        ThreadPlan(
            1,
            0.237,
            {},
            [
                Publish("2", ((0.0, 1), (0.712, 1)), 3.596, 0, None, False, 0.0),
                Publish("k", ((0.0052, 1), (1.03, 0)), 0.1216, 1, None, False, 0.5),
            ],
        ),
    ]
    options = {"scope": "job", "policy": "reschedule", "late": False, "expire": 0.6, "replace": False}
    fates = {(1, 1): "lost", (0, 1): "late", (0, 3): "late", (0, 5): "slow"}
    plan = Plan(55903, 2, threads, faulty_until=12.0, fates=fates, options=options)
    assert failure_of("celery", plan) is None


def test_the_note_after_a_repeated_call_holds_up_no_quorum_lock_beside_a_slow_server():
    """A server did not answer, granted its part when it was asked again, and did not answer the note that the first
    call gets nothing: that was waited for with the patience of an ordinary lock."""
    slow = {"expire": 0.6, "auto_renewal": False}
    threads = [
        ThreadPlan(0, 0.12558277927472453, slow, [QuorumRound(0.4, 0.10592127728501488, None, 0.0)]),
        ThreadPlan(1, 0.25902376056952153, slow | {"expire": 3.0}, [QuorumRound(0.4, 3.2482632346776157, None, 0.0)]),
    ]
    fates = {(32, 2): "slow", (49, 1): "unanswered", (49, 3): "slow"}
    plan = Plan(1077115, 3, threads, faulty_until=12.0, fates=fates, options={"rates": [1.0, 1.0, 1.0]})
    assert failure_of("quorum", plan) is None


def test_a_try_of_a_quorum_lock_does_not_wait_for_the_one_server_that_is_silent():
    """Another one missed its short time, so both were asked again. It refused, the third had granted, and then the
    silent one was waited for with all the time that it may have."""
    rounds = [QuorumRound(0.4, 2.918607979340018, None, 0.0), QuorumRound(0.0, 3.1147149002089947, None, 0.1)]
    threads = [
        ThreadPlan(0, 0.06856661123409626, renewed(3.0), rounds),
        ThreadPlan(1, 0.03603139584219815, renewed(1.0), [QuorumRound(None, 0.16537989224719377, None, 0.1)]),
    ]
    silence = Fault(1.3280515831381305, "silence", 2, 4.0)
    plan = Plan(2003017, 2, threads, [silence], faulty_until=12.0, fates={}, options={"rates": [1.0, 1.0, 1.0]})
    assert failure_of("quorum", plan) is None


def test_who_is_sent_a_value_late_leaves_the_queue_that_it_joined_again():
    """It looked while the next caller computed, and then the message of the caller before arrived. Its place made the
    next computation wait half a second for a waiter that had gone."""

    def get(wait: float | None, computes: float, pause: float, fails: bool = False) -> Get:
        return Get(("a",), wait, computes, fails, "", False, pause)

    long, short = {"expire": 3.0, "max_hold": None}, {"expire": 0.6, "max_hold": 2.0}
    delete, brief = Change("a", "delete", 0.01), Change("a", "brief", 0.3)
    threads = [
        ThreadPlan(0, 0.14472647418283924, short, [delete]),
        ThreadPlan(0, 0.0, short, [get(0.2, 0.0, 0.3)]),
        ThreadPlan(1, 0.26241723477923334, long, [get(1.0, 0.9944678696245866, 0.3, True), brief]),
        ThreadPlan(1, 0.04989720471680289, long, [get(0.2, 0.853282718575606, 0.01, True)]),
        ThreadPlan(
            2,
            0.0,
            short,
            [get(1.0, 0.11783035097667592, 0.01), get(0.2, 0.005653396185207806, 0.0), get(0.2, 0.0, 0.3)],
        ),
        ThreadPlan(
            2,
            0.2180730480553805,
            {"expire": 1.0, "max_hold": 2.0},
            [get(0.2, 0.6005316317353062, 0.0), delete._replace(pause=0.0), get(None, 2.491784478494931, 0.0)],
        ),
    ]
    options = {"stale": False, "large": False, "unkept": False}
    assert failure_of("cache", Plan(21002310, 3, threads, fates={}, options=options)) is None


def test_two_computations_of_one_process_whose_waits_are_over_do_not_follow_each_other():
    """Three values need each other, and none is stored yet. Each of two threads computed one beside the process that
    had its lease, needed the other's, and followed it without an end."""

    def thread(process: int, starts: float, expire: float, key: str, computes: float, pause: float) -> ThreadPlan:
        return ThreadPlan(process, starts, {"expire": expire}, [GetNested(key, computes, pause)])

    threads = [
        thread(0, 0.0, 0.6, "b", 1.0, 0.0),
        thread(1, 0.0, 3.0, "c", 1.0, 0.01),
        thread(1, 0.16079101287333825, 0.6, "b", 0.2, 0.0),
        thread(2, 0.0, 0.6, "a", 1.0, 0.3),
    ]
    options = {"rates": [1.0] * 3, "needs": "circle of three", "homes": [0, 0, 0]}
    plan = Plan(490, 3, threads, faulty_until=12.0, options=options)
    assert failure_of("nested", plan) is None

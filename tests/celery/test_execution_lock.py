"""A lock that goes from a message to its execution, and the mark of what has been processed."""

from __future__ import annotations

import threading

import pytest

from django_redislock import LockLost, NotAcquired
from django_redislock.celery.execution_lock import FINISH, AfterRelease, Delivery, ExecutionLock, marker_key
from django_redislock.core import Lock, events
from django_redislock.core.driver import pool as pool_module, server as server_module
from django_redislock.exceptions import LockBackendError
from django_redislock.task_names import waiting_id
from tests.support import BUSY, begin, lived, wait_until
from tests.support.clients import client_at
from tests.support.interruptions import TimeLimit, interrupted_at_each_point

RETRY = Delivery("task", "task:1:two", known=True)
FIRST = COPY = Delivery("task", "task:0:one", known=True)


@pytest.fixture
def lock(client):
    """Make a lock of one name; give an `id` for a message and a `delivery` for an execution."""

    def lock(**options):
        return ExecutionLock(client, "name", expire=30).with_name("name", **options)

    return lock


def test_an_execution_takes_over_what_its_message_holds(lock):
    message, execution = lock(id="task"), lock(delivery=FIRST, details={"worker": "w"})
    assert message.acquire(blocking=False)
    before, other = message.owner(), lock(delivery=Delivery("another"))
    assert not other.acquire(blocking=False)
    assert not other.processed
    assert execution.acquire(blocking=False)
    after = execution.owner()
    assert after.fence > before.fence
    assert (before.worker, after.worker) == ("", "w")
    assert message.release_given_id() is False
    assert execution.owned()
    execution.release()
    assert execution.owner() is None


def test_a_copy_does_not_take_over_from_a_living_execution(lock):
    execution, copy = lock(delivery=FIRST), lock(delivery=COPY)
    assert execution.acquire(blocking=False)
    assert not copy.acquire(timeout=10), "it does not wait for it"
    assert not copy.processed
    assert 29 < copy.retry_in <= 30, "when the life of the execution has ended, if nobody renews it"
    assert copy.is_copy(copy.owner())
    assert not execution.is_copy(execution.owner()), "a message was dropped for its own execution, which had no answer"
    assert not lock(id="task").acquire(blocking=False), "nor does what it publishes"


def test_another_message_of_the_same_id_is_no_copy(lock):
    execution, retry = lock(delivery=FIRST), lock(delivery=RETRY)
    assert execution.acquire(blocking=False)
    assert not retry.acquire(blocking=False)
    assert not retry.refused
    assert not retry.is_copy(retry.owner())
    execution.ending = AfterRelease("done", 30)
    execution.release()
    assert retry.acquire(blocking=False)
    retry.release()


def test_a_message_that_nothing_tells_from_others_is_not_asked_about(lock):
    unknown = Delivery("task", "task:0:", known=False)
    for _ in range(2):
        execution = lock(delivery=unknown)
        assert execution.acquire(blocking=False)
        execution.ending = AfterRelease("done", 30)
        execution.release()
    copy = lock(delivery=unknown._replace(known=True))
    assert not copy.acquire(blocking=False)
    assert copy.processed, "the broker said that it had come before"


def test_an_execution_without_a_message_leaves_no_marker_and_begins_its_id_with_that_of_the_task(client, lock):
    """As of a direct call. A marker without a message would be one for all of them."""
    direct = Delivery("task", known=True)
    for _ in range(2):
        execution = lock(delivery=direct)
        assert execution.acquire(blocking=False)
        assert execution.owner().id.startswith("task:")
        execution.ending = AfterRelease("done", 30)
        execution.release()
        execution.mark_processed(30)
        assert not client.keys("*:done:*")


def test_a_message_that_takes_its_lock_reports_its_fence_and_one_that_is_refused_reports_nothing(lock, monkeypatch):
    heard = []
    monkeypatch.setattr(events, "listeners", [lambda event, data: heard.append((event, data))])
    message = lock(id="task")
    assert message.take(fresh=True)
    assert heard == [("acquired", {"name": "name", "fence": message.owner().fence})]
    assert not lock(id="other").take(fresh=True)
    assert len(heard) == 1
    assert lock(id="other").take_ahead()() is False
    assert len(heard) == 1


@pytest.mark.slow
def test_a_thread_that_is_interrupted_at_any_point_of_its_calls_sends_ahead_again(client):
    def message(name):
        own = name.replace(" ", "-")  # the note of a call that was given up has its id, and so is of one message
        return ExecutionLock(client, name, expire=30).with_name(name, id=own)

    def send_ahead(point):
        assert not message(f"interrupted {point}").owned()
        assert message(f"interrupted {point}").take_ahead()() is True

    def send_ahead_unanswered():
        _receive = message("unanswered").take_ahead()
        raise TimeLimit

    with pytest.raises(TimeLimit):
        send_ahead_unanswered()
    for point in interrupted_at_each_point(send_ahead, server_module, pool_module):
        assert not message(f"after {point}").owned()  # opens a connection, because the interrupted one is closed
        assert message(f"after {point}").take_ahead()() is True
    assert point > 50


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [True, False])
def test_a_message_gives_back_the_lock_that_no_replica_confirmed_unless_its_id_held_it_before(client, lock, fresh):
    unconfirmed = ExecutionLock(client, "name", expire=60, min_replicas=2).with_name("name", id="task")
    with pytest.raises(LockBackendError, match="of 2 replicas"):
        unconfirmed.take(fresh=fresh)
    wait_until(lambda: not client.exists(unconfirmed._keys.lock))
    assert lock(id="task").acquire(blocking=False)
    with pytest.raises(LockBackendError, match="of 2 replicas"):
        unconfirmed.take()
    assert lock(id="task").owned()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_a_message_whose_lock_is_granted_after_its_expiry_asks_for_it_again(redis_url, proxy, ahead):
    with client_at(redis_url) as client, client_at(proxy.url, socket_timeout=5) as behind:
        message = ExecutionLock(behind, "name", expire=2).with_name("name", id="task")
        assert not message.owned()  # opens a connection
        grant = proxy.hold_next_reply(containing=b"EVALSHA")
        ended = begin(grant.let_go_after, lambda: wait_until(lambda: not client.exists(message._keys.lock)))
        assert not ahead or message.take_ahead()() is None
        assert message.take(fresh=True)
        ended.result()
        assert client.exists(message._keys.lock)


def test_of_the_copies_of_a_message_one_is_refused_for_all(lock):
    first, copy = lock(delivery=FIRST), lock(delivery=COPY)
    assert first.claim(30, "done")
    assert not copy.claim(30, "done")
    assert copy.processed
    assert not copy.acquire(blocking=False)
    assert copy.processed


def test_a_message_is_not_refused_while_its_copy_runs(lock):
    execution, copy = lock(delivery=FIRST), lock(delivery=COPY)
    execution.acquire()
    assert not copy.claim(30, "done")
    assert copy.retry_in > 29
    execution.release()
    assert copy.claim(30, "done")


def test_while_one_is_published_again_no_copy_runs_and_then_the_last_version_does(lock):
    first, copy, second = lock(delivery=FIRST), lock(delivery=COPY), lock(delivery=FIRST._replace(version=1))
    assert first.claim(20, "ending")
    assert not copy.claim(20, "ending")
    assert not copy.acquire(blocking=False)
    assert 19 < copy.retry_in <= 20
    first.mark_processed(30, 1)
    assert not copy.acquire(blocking=False)
    assert copy.processed
    assert second.acquire(blocking=False)
    second.release()


def test_what_looks_again_takes_nothing_from_what_is_known(lock):
    copy, execution = lock(delivery=COPY), lock(delivery=FIRST)
    execution.mark_processed(30)
    copy.mark_processed(30, 1, alone=False)
    assert not lock(delivery=FIRST._replace(version=5)).acquire(blocking=False), "it has been processed"
    other, late = Delivery("o", "o:0:x", known=True), Delivery("o", "o:0:x", known=True, version=1)
    lock(delivery=other).mark_processed(30, 2, alone=False)
    lock(delivery=other).mark_processed(30, 1, alone=False)
    assert not lock(delivery=late).acquire(blocking=False), "the second version is the last one"


def test_a_claim_whose_answer_was_lost_is_the_callers_all_the_same(client, lock):
    first = lock(delivery=FIRST)
    keys = *(first._keys[key] for key in (0, 1, 3, 4)), marker_key(first._keys, FIRST), first._keys.lock

    def claim(claim):
        return client.eval(
            FINISH.text, len(keys), *keys, b"refuse", b"9000", *[b""] * 6, b"0", claim, b"done", b"task:0:one"
        )

    assert [claim(b"claim"), claim(b"claim"), claim(b"other")] == [1, 1, 0]


@pytest.mark.slow
def test_a_marker_that_is_not_confirmed_ends_with_its_expiry(lock):
    """Whoever ran it died before its result was stored: then a copy may be the only one."""
    execution, copy = lock(delivery=FIRST), lock(delivery=COPY)
    execution.acquire()
    execution.ending = AfterRelease("ending", 1)
    execution.release()
    assert not copy.acquire(timeout=10), "it does not wait for that"
    assert not copy.processed
    assert 0 < copy.retry_in <= 1
    wait_until(lambda: copy.acquire(blocking=False), 1 + BUSY)
    copy.release()


def test_a_message_marked_as_processed_is_processed(client, lock):
    execution, copy = lock(delivery=FIRST), lock(delivery=COPY)
    execution.acquire()
    execution.ending = AfterRelease("ending", 30)
    execution.release()
    execution.mark_processed(30)
    assert not copy.acquire(timeout=10)
    assert copy.processed
    retry = lock(delivery=RETRY)
    assert retry.acquire(blocking=False), "another message of the same task"
    retry.release()


def test_the_copy_that_waits_learns_that_it_was_processed(client, lock):
    holder, execution, copy = Lock(client, "name", expire=30), lock(delivery=FIRST), lock(delivery=COPY)
    holder.acquire()
    answers = []

    def run(one):
        answers.append(one.acquire(timeout=20))
        if answers[-1]:
            one.ending = AfterRelease("done", 30)
            one.release()

    threads = [threading.Thread(target=run, args=(one,)) for one in (execution, copy)]
    for thread in threads:
        thread.start()
    wait_until(lambda: holder.owner().waiting == 2)
    holder.release()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(answers) == [False, True]
    assert sorted([execution.refused, copy.refused]) == [False, True]
    assert copy.owner() is None
    assert not client.exists(copy._keys.queue)


def test_a_marker_is_left_also_where_the_lock_was_lost(client, lock):
    execution, copy = lock(delivery=FIRST), lock(delivery=COPY)
    execution.acquire()
    execution.reset()
    execution.ending = AfterRelease("ending", 30)
    with pytest.raises(LockLost):
        execution.release()
    assert not copy.acquire(blocking=False)


def test_a_lock_that_is_kept_is_somebody_elses_for_its_life(lock):
    execution = lock(delivery=FIRST)
    execution.acquire()
    execution.ending = AfterRelease(keep_id="task", keep=20)
    execution.release()
    with pytest.raises(NotAcquired):
        execution.release()
    assert 0 < execution.ttl() <= 20
    again = lock(delivery=FIRST)
    assert again.acquire(blocking=False), "the id that keeps it is its own message's"
    again.release()


def test_an_execution_waits_its_turn_among_other_locks(client, lock):
    execution = lock(delivery=FIRST)
    with Lock(client, "name"):
        assert not execution.acquire(timeout=0.01)
    assert not client.exists(execution._keys.queue)
    assert execution.acquire(blocking=False)
    execution.release()


@pytest.mark.parametrize("task_id", ["", "a b", "ü", "x" * 1000, "a:b\n"])
def test_any_task_id_gives_an_owner_id(lock, task_id):
    message = lock(id=waiting_id(task_id))
    assert message.acquire(blocking=False)
    execution = lock(delivery=Delivery(waiting_id(task_id)))
    assert execution.acquire(blocking=False)
    execution.release()


@pytest.mark.slow
def test_a_message_that_waits_in_a_worker_lives_no_longer_than_the_worker(lock):
    """Its own life is that of a queue; should the process die in the wait, the message is lost."""
    message = lock(id="task", auto_renewal=False, expire=600)
    assert message.acquire(blocking=False)
    with message.keep_alive(2):
        assert message.ttl() <= 2
        lived(2.5)
        assert message.owned()
    assert message.ttl() <= 2
    message.release_given_id()

"""What depends on the broker, with RabbitMQ: tests of the other modules, on workers of processes and of greenlets."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery.result import AsyncResult
from kombu import Exchange, Queue

from django_redislock.core import Lock
from tests.celery.test_discarded import (  # noqa: F401
    test_a_message_that_its_worker_cannot_decode_leaves_no_lock,
    test_a_message_whose_worker_does_not_have_the_task_leaves_no_lock,
    torn,
    unknown,
)
from tests.celery.test_faults import test_child_killed_and_its_message_delivered_again  # noqa: F401
from tests.celery.test_redelivery import (  # noqa: F401
    test_the_only_copy_runs_when_the_child_was_killed,
    test_the_only_copy_runs_when_the_child_was_killed_before_its_result_was_stored,
)
from tests.celery.test_scopes import (  # noqa: F401
    only_prefork,
    task,
    task_queue,
    test_a_purged_message_frees_its_lock_within_its_life,
    test_a_revoked_message_frees_its_lock,
    test_canvases_end_though_a_duplicate_waits,
    test_job_lasts_over_retries,
    test_of_queued_and_run_one_waits_and_one_runs,
    test_while_one_waits_none_is_published,
)
from tests.celery.test_soak import SECONDS, Reaper
from tests.celery.test_workers import (  # noqa: F401
    blocked,
    holder,
    test_a_crowd_on_few_keys,
    test_reschedule_runs_later_under_the_same_id_without_a_retry,
    test_the_lock_is_released_however_a_task_ends,
    test_wait_runs_one_after_the_other,
)
from tests.support import Proxy, client_at, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import BROKER, app
from tests.support.celery_site.harness import TaskQueue, WorkerPools, ended, workers
from tests.support.worker import Worker

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]


@pytest.fixture(scope="module")
def worker_pools(server, rabbitmq, tmp_path_factory) -> Iterator[WorkerPools]:
    with workers(server, tmp_path_factory.mktemp("rabbitmq"), rabbitmq.url) as worker_pools:
        yield worker_pools


@pytest.fixture(params=["prefork", "gevent"])  # test_workers.py and test_scopes.py have every pool
def pool(request) -> str:
    return request.param


def pytest_generate_tests(metafunc) -> None:
    """Kill only the children of prefork workers: the others have none, and would be killed themselves."""
    if "pool" in metafunc.fixturenames and "killed" in metafunc.function.__name__:
        metafunc.definition.add_marker(only_prefork)


@pytest.fixture
def dead_lettered(worker_pools, rabbitmq) -> Iterator[TaskQueue]:
    """A queue whose rejected messages wait for a quarter of a second in another queue, and then come back."""
    apart = TaskQueue(worker_pools.of("prefork")).with_queue_of_its_own()
    again = f"{apart.queue}-again"

    def back_to(queue: str, **more: Any) -> dict[str, Any]:
        return {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue, **more}

    with app.connection_for_write() as connection, connection.channel() as channel:
        Queue(again, queue_arguments=back_to(apart.queue, **{"x-message-ttl": 250})).bind(channel).declare()
        queue = Queue(apart.queue, Exchange(apart.queue), apart.queue, queue_arguments=back_to(again))
        queue.bind(channel).declare()
        app.amqp.queues.add(queue)
        for worker in apart.workers:
            options = {"queue_arguments": back_to(again)}
            app.control.add_consumer(
                apart.queue, apart.queue, routing_key=apart.queue, options=options, destination=[worker.hostname]
            )
        yield apart


@pytest.mark.parametrize("how", ["reject once", "fail once"])
@pytest.mark.parametrize("number", range(len(tasks.rejected)))
def test_a_rejected_message_that_comes_back_as_a_dead_letter_runs(dead_lettered, number, how):
    result = dead_lettered.publish(tasks.rejected[number], how)
    # A new object each time, because one keeps the first failure that it has seen.
    wait_until(lambda: app.AsyncResult(result.id).result == f"ran {result.id}")
    assert len(dead_lettered.run_log.events("start")) == 2


@pytest.mark.parametrize("number", range(len(tasks.refusing)))
def test_a_message_that_failed_because_its_lock_was_held_runs_when_it_comes_back_as_a_dead_letter(
    dead_lettered, number, server
):
    refusing = tasks.refusing[number]
    with client_at(server.url) as client, Lock(client, f"celery:{refusing.name}:{dead_lettered.name}"):
        result = dead_lettered.publish(refusing)
        wait_until(lambda: app.AsyncResult(result.id).state == "FAILURE")
    wait_until(lambda: app.AsyncResult(result.id).result == f"ran {result.id}")


def test_children_killed_at_random_while_dead_letters_come_back(dead_lettered):
    """Each message runs to its end at last, whatever rejected it, and none beside another one of its key."""
    queues = [(TaskQueue(dead_lettered.workers), rejected) for rejected in tasks.rejected for _ in range(2)]
    for each, _ in queues:
        each.queue = dead_lettered.queue
    ids, open_ones = set[str](), set[str]()
    reaper = Reaper(dead_lettered.workers, (0.25, 0.75))
    end = time.monotonic() + SECONDS

    def ran(id: str) -> bool:
        return app.AsyncResult(id).result == f"ran {id}"  # a new object each time: one keeps the first failure

    while time.monotonic() < end:
        open_ones = {id for id in open_ones if not ran(id)}
        for _ in range(30 - len(open_ones)):
            each, rejected = random.choice(queues)
            open_ones.add(each.publish(rejected, random.choice(["brief", "reject at times", "fail at times"])).id)
        ids |= open_ones
        reaper.pass_by()
    wait_until(
        lambda: all(map(ran, ids)), 120, lambda: f"each runs to its end; not {[id for id in ids if not ran(id)]}"
    )
    starts = [len(each.run_log.events("start")) for each, _ in queues]
    print(f"{len(ids)} ids, {sum(starts)} starts, {len(reaper.killed)} killed")
    # The scope "queued" ends with the start of a run.
    assert not any(each.run_log.events("overlap") for each, one in queues if one.name != "late.rejected_queued")


# Every policy: with RabbitMQ, copies come of a connection that is gone, at once


LATE = tasks.COPIED[1::2]


def received(worker: Worker, results: list[AsyncResult]) -> None:
    """Wait until the worker has all of these in its memory."""
    wait_until(lambda: all(f"[{result.id}] received" in worker.log for result in results))


def taken_over(queues: list[TaskQueue], worker_pools: WorkerPools) -> None:
    """Let another worker take the messages of these queues, which have one queue."""
    queues[0].workers = worker_pools.of("prefork")
    queues[0].consume()


def test_when_the_whole_worker_was_killed_each_of_its_messages_runs_once_to_its_end(worker_pools):
    """What ran runs again when its lock has ended; what waited in its memory has never run."""
    doomed = worker_pools.start(
        "prefork", 0, "--prefetch-multiplier=20", name="doomed", concurrency=len(LATE)
    ).wait_ready()
    running = {TaskQueue([doomed]): each for each in LATE}
    waiting = {TaskQueue([doomed]): each for each in tasks.COPIED}
    cut_off = [one.publish(each, "once killed") for one, each in running.items()]
    for one in running:
        one.run_log.wait_for("start")
    others = [one.publish(each) for one, each in waiting.items()]
    received(doomed, others)
    assert "amqp://" in doomed.log
    doomed.kill()
    taken_over([*running], worker_pools)
    for result in [*cut_off, *others]:
        assert ended(result).result == f"ran {result.id}"
    for one in [*running, *waiting]:
        assert len(one.run_log.events("start")) == (2 if one in running else 1)
        assert len(one.run_log.events("end")) == 1
        assert one.run_log.events("overlap") == []


def test_when_the_connection_was_lost_no_message_runs_beside_the_worker_that_has_it_nor_again(worker_pools, rabbitmq):
    """The broker gives all to another worker, while this one runs a part of them, and then starts the rest."""
    with Proxy(rabbitmq.url) as proxy:
        broker = {BROKER: rabbitmq.url.replace(f":{rabbitmq.port}/", f":{proxy.port}/")}
        options = ("--prefetch-multiplier=20",)
        cut_off = worker_pools.start(
            "threads", 0, *options, name="cut-off", concurrency=len(LATE), env=broker
        ).wait_ready()
        running = {TaskQueue([cut_off], blocked=True): each for each in LATE}
        waiting = {TaskQueue([cut_off]): each for each in tasks.COPIED}
        first = [one.publish(each) for one, each in running.items()]
        for one in running:
            one.run_log.wait_for("start")
        others = [one.publish(each) for one, each in waiting.items()]
        received(cut_off, others)
        proxy.lead_to("amqp://127.0.0.1:1")
        taken_over([*running], worker_pools)
        for result in others:
            assert ended(result).result == f"ran {result.id}"
        (heir,) = worker_pools.of("prefork")
        wait_until(lambda: all(f"[{result.id}] is running, or its worker has died" in heir.log for result in first))
        since = time.monotonic()
        wait_until(lambda: time.monotonic() > since + 3)  # longer than their locks live: what ran is known for longer
        for one in running:
            one.run_log.let_bodies_end()
        for result in first:
            assert ended(result).result == f"ran {result.id}"
        wait_until(lambda: all(f"[{result.id}] was processed before; this copy" in heir.log for result in first))
        wait_until(lambda: all(f"[{result.id}] was processed before; this copy" in cut_off.log for result in others))
        for one in [*running, *waiting]:
            assert len(one.run_log.events("start")) == 1
        assert {result.state for result in [*first, *others]} == {"SUCCESS"}
        cut_off.kill()

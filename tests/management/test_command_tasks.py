"""``manage.py redislock``: the locks of a task, and names that are not written out."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from celery import Celery
from django.core.management import call_command
from django.core.management.base import CommandError

from django_redislock import LockLost
from django_redislock.celery import DuplicateResult, single_instance
from django_redislock.celery.key import lock_name
from django_redislock.core import held_locks
from django_redislock.management import selection
from django_redislock.task_names import is_waiting, key_of, task_of
from tests.support import RedisServer, wait_until
from tests.support.admin_pages import hold
from tests.support.celery_site import tasks
from tests.support.celery_site.harness import TaskQueue, WorkerPools, ended

pytestmark = pytest.mark.usefixtures("locks_by_url")


def run(*arguments: str, answer: str | None = None) -> tuple[str, str]:
    """Run the command; return what it wrote to its outputs."""
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(answer or ""))
        call_command("redislock", *arguments, stdout=output, stderr=errors)
    return output.getvalue(), errors.getvalue()


def names(client: redis.Redis) -> list[str]:
    return [info.name for info in held_locks(client)]


@pytest.fixture
def app() -> Iterator[Celery]:
    with Celery("commanded", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.task_default_queue = "commanded"
        yield app


@pytest.fixture
def make(app: Celery) -> Any:
    def make(name: str, **options: Any) -> Any:
        def body(a: int = 1, b: int = 2) -> str:
            return "ran"

        return app.task(name=name, shared=False, lazy=False)(single_instance(**options)(body))

    return make


@contextmanager
def running(task: Any, *args: Any) -> Iterator[Any]:
    """Hold the lock of an execution."""
    with task._running_lock(task._key_of(args, {}), task._options, None, (), {}) as lock:
        yield lock


# The names of tasks


def test_the_name_of_a_lock_tells_its_task_and_its_key() -> None:
    for task, kind, key in itertools.product(
        ("shop.tasks.nightly", "a:b", "50%", "%3A", "ä"),
        ({"kind": "celery"}, {"kind": "celery-queue"}, {"message": "id:0:nonce"}),
        ("", "report:42", "%3A"),
    ):
        name = lock_name(task, key, **kind)
        assert (task_of(name), key_of(name)) == (task, key)
    for other in ("invoice:42", "celery", "celery:", "celery-other:a", "cache:celery:a"):
        assert task_of(other) is None


@pytest.mark.parametrize("scope", ["queued", "queued+run", "job"])
@pytest.mark.parametrize("task_id", [None, "an id with spaces"])
def test_a_message_waits_and_an_execution_and_what_is_kept_after_it_do_not(
    client: redis.Redis, make: Any, scope: str, task_id: Any
) -> None:
    task, kept = make("waits", scope=scope), make("kept", keep_for=60)
    task.apply_async((1,), task_id=task_id)
    kept.apply()
    with running(task, 2):
        assert sorted(is_waiting(info) for info in held_locks(client)) == [False, False, True]


# release --task


def test_what_a_purge_left_is_freed_in_one_command(client: redis.Redis, make: Any) -> None:
    task, other = make("shop.purged", scope="job"), make("shop.purged_not", scope="job")
    for number in range(30):
        task.delay(number)
    other.delay(1)
    assert isinstance(task.delay(3), DuplicateResult)
    with running(task, 100) as lock:
        output, errors = run("release", "--task", "shop.purged", "--waiting", answer="y\n")
        assert lock.owned()
    assert output == "Released 30 locks of shop.purged.\n"
    assert errors.count("celery:shop.purged:") == 20
    for text in ("… and 10 more", "No message is deleted", "Force-release 30 locks? [y/N]"):
        assert text in errors
    assert "The holder is not stopped" not in errors
    assert not isinstance(task.delay(3), DuplicateResult)
    assert isinstance(other.delay(1), DuplicateResult)


def test_without_waiting_the_locks_of_executions_are_released_too(client: redis.Redis, make: Any) -> None:
    task = make("shop.both", scope="queued+run")
    task.delay(1)
    with pytest.raises(LockLost), running(task, 2):
        output, errors = run("release", "--task", "shop.both", "--yes")
        assert names(client) == []
    assert output == "Released 2 locks of shop.both.\n"
    assert "The holder is not stopped" in errors


def test_the_runs_of_a_group_are_released_by_its_name_because_their_locks_have_that(
    client: redis.Redis, make: Any
) -> None:
    of_crm = "The task is in the group 'crm', and its runs hold the locks of that: see --task crm."
    task = make("of_group", key="{a}", group="crm", scope="queued+run")
    with pytest.raises(LockLost), task._running_lock("7", task._options, None, (), {}):
        with pytest.raises(CommandError, match=rf"No lock of the task 'of_group' is held\. {of_crm}$"):
            run("release", "--task", "of_group", "--yes")
        task.delay(8)
        _, errors = run("release", "--task", "of_group", "--yes")
        assert of_crm in errors, "besides the lock of its waiting message"
        _, errors = run("release", "--task", "crm", "--match", "7", "--yes")
        assert "The task is in the group" not in errors
        assert names(client) == []


def test_a_pattern_chooses_by_key_or_by_arguments(client: redis.Redis, make: Any) -> None:
    """``a=[1, 2], b=2``, copied from 'show', matched nothing: its brackets were a set of characters."""
    by_key, by_arguments = make("by_key", scope="job", key="report:{a}"), make("by_arguments", scope="job")
    for task, argument in itertools.product((by_key, by_arguments), (1, 2, 11, [1, 2])):
        task.delay(argument)
    run("release", "--task", "by_key", "--match", "report:1*", "--yes")
    for pattern in ("a=2, *", "a=[1, 2], b=2"):
        run("release", "--task", "by_arguments", "--match", pattern, "--yes")
    left = [info.arguments for info in held_locks(client)]
    assert sorted(left) == ["a=1, b=2", "a=11, b=2", "a=2, b=2", "a=[1, 2], b=2"]
    assert names(client).count("celery:by_key:report:2") == 1


def test_a_dry_run_shows_all_and_releases_none(client: redis.Redis, make: Any) -> None:
    task = make("dry", scope="job")
    for number in range(30):
        task.delay(number)
    output, errors = run("release", "--task", "dry", "--waiting", "--dry-run", "--yes")
    assert output == "Dry run: nothing was released of 30 locks.\n"
    assert errors.count("celery:dry:") == 30
    assert "a=17, b=2" in errors
    assert len(names(client)) == 30


def test_it_asks_before_it_releases(client: redis.Redis, make: Any) -> None:
    make("asked", scope="job").delay()
    for answer in ("", "n\n"):
        with pytest.raises(CommandError, match="Not confirmed; nothing was released"):
            run("release", "--task", "asked", answer=answer)
    assert len(names(client)) == 1


def test_a_message_that_starts_meanwhile_keeps_its_lock(
    client: redis.Redis, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make("starts", scope="job", key=[])
    first = task.delay()

    class Slow(io.StringIO):
        def readline(self, *args: Any) -> str:
            task._waiting_lock("", first.id, task._options, {}).release_given_id()
            lock.acquire()
            return "y\n"

    lock = task._running_lock("", task._options, None, (), {})
    monkeypatch.setattr(sys, "stdin", Slow())
    errors = io.StringIO()
    with pytest.raises(CommandError, match=r"Nothing was released\."):
        call_command("redislock", "release", "--task", "starts", "--waiting", stderr=errors, stdout=io.StringIO())
    assert "Not released, because the holder changed or the lock ended meanwhile: 1 lock." in errors.getvalue()
    assert lock.owned()
    lock.release()


def test_a_lock_that_is_only_named_like_a_tasks_is_left_alone(client: redis.Redis, make: Any) -> None:
    hold(client, "celery:lookalike:1", kind="lock")
    with pytest.raises(CommandError, match="No lock of the task 'lookalike' is held"):
        run("release", "--task", "lookalike", "--yes")


def test_a_task_that_holds_nothing_is_told_with_those_that_may_be_meant(client: redis.Redis, make: Any) -> None:
    make("shop.tasks.build", scope="job").delay()
    for wrong in ("build", "shop.tasks.buidl", "shop.tasks"):
        with pytest.raises(
            CommandError, match=rf"No lock of the task '{wrong}' is held\. Did you mean 'shop.tasks.build'"
        ):
            run("release", "--task", wrong, "--yes")
    with pytest.raises(CommandError, match=r"'nothing like it' is held\.$"):
        run("release", "--task", "nothing like it", "--yes")
    with pytest.raises(CommandError, match="holds 1 lock, and none of them matches the options"):
        run("release", "--task", "shop.tasks.build", "--match", "other", "--yes")
    assert len(names(client)) == 1


def test_arguments_that_do_not_go_together_are_an_error() -> None:
    for arguments in ("", "name --task a", "--task a --id x", "name --waiting", "name --match *"):
        with pytest.raises(CommandError, match="--task NAME"):
            run("release", *arguments.split(), "--yes")


@pytest.mark.processes
def test_only_what_waits_is_freed_while_a_worker_runs_the_task(worker_pools: WorkerPools, client: redis.Redis) -> None:
    """With a message that the worker has put off, and one that is still in the queue."""
    task_queue = TaskQueue(worker_pools.of("prefork"), blocked=True)
    task = tasks.queued_and_run_later  # the message that is put off must not come again before the third one
    first = task_queue.publish(task)
    task_queue.run_log.wait_for("start")
    second = task_queue.publish(task)
    wait_until(lambda: second.state == "RETRY")
    assert isinstance(task_queue.publish(task), DuplicateResult)
    output, errors = run("release", "--task", task.name, "--waiting", "--match", task_queue.name, "--yes")
    assert output == f"Released 1 lock of {task.name}.\n"
    assert "celery-queue:" in errors
    assert task.lock_info(task_queue.name).label == f"{task.name}[{first.id}]", "the run goes on"
    third = task_queue.publish(task)
    assert not isinstance(third, DuplicateResult)
    task_queue.run_log.let_bodies_end()
    assert [ended(result).state for result in (first, second, third)] == ["SUCCESS"] * 3
    assert task_queue.run_log.events("overlap") == []


# Names that are not written out


@pytest.fixture
def three(client: redis.Redis) -> None:
    for name in ("invoice:421", "invoice:43", "celery:shop.report:7"):
        hold(client, name)


@pytest.mark.usefixtures("three")
def test_a_unique_beginning_is_shown_and_released(client: redis.Redis) -> None:
    assert "invoice:421" in run("show", "invoice:42")[0]
    assert run("release", "invoice:42", answer="y\n")[0] == "Released invoice:421.\n"
    assert names(client) == ["celery:shop.report:7", "invoice:43"]


@pytest.mark.usefixtures("three")
def test_what_is_no_unique_beginning_is_told_with_what_may_be_meant() -> None:
    meant = {
        "invoice:4": "'invoice:421' or 'invoice:43'",
        "report:7": "'celery:shop.report:7'",
        "Shop.Report": "'celery:shop.report:7'",
        "invocie:43": "'invoice:43'",
    }
    for action, (wrong, right) in itertools.product(("show", "release"), meant.items()):
        with pytest.raises(CommandError, match=rf"The lock '{wrong}' is not held now\. Did you mean {right}"):
            run(action, wrong, answer="y\n")


@pytest.mark.usefixtures("three")
def test_what_nobody_is_asked_about_is_released_by_its_whole_name_only(client: redis.Redis) -> None:
    """A script that releases invoice:42 does not take invoice:421 when that is free."""
    with pytest.raises(CommandError, match="The lock 'invoice:42' is not held now"):
        run("release", "invoice:42", "--yes")
    assert len(names(client)) == 3
    (info,) = [info for info in held_locks(client) if info.name == "invoice:421"]
    run("release", "invoice:42", "--yes", "--id", info.id)
    assert len(names(client)) == 2


def test_a_name_that_is_another_ones_beginning_is_itself(client: redis.Redis) -> None:
    hold(client, "a")
    hold(client, "ab")
    run("release", "a", "--yes")
    assert names(client) == ["ab"]


@pytest.mark.usefixtures("three")
def test_nothing_is_guessed_where_a_connection_cannot_be_read(
    settings: Any, own_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    cache = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": own_server.url}
    settings.CACHES = settings.CACHES | {"second": cache}
    own_server.kill()
    with pytest.raises(CommandError, match="'second' could not be read"):
        run("show", "invoice:42")
    assert len([record for record in caplog.records if record.name == "django_redislock"]) == 1, "asked once"


def test_of_many_similar_names_a_few_are_told() -> None:
    names = [f"invoice:{number}" for number in range(100)]
    assert selection.near("invoice:", names) == ["invoice:0", "invoice:1", "invoice:10", "invoice:11", "invoice:12"]
    assert selection.near("elsewhere", names) == []

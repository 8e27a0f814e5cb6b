"""The scheduler of django-celery-beat: what the beats write into the database, and read from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.schedules import schedule
from django.apps import apps
from django.db import connection

from django_redislock import LockLost, lock
from django_redislock.celery import beat, single_instance
from tests.support import using_databases
from tests.support.databases import sqlite_file

pytest.importorskip("django_celery_beat", reason="django-celery-beat has no release for this Django")
pytestmark = pytest.mark.usefixtures("locks_by_url")

HOUR = timedelta(hours=1)
NAMES = ["bills", "report"]


@pytest.fixture
def start(settings: Any, tmp_path: Path, django_db_blocker: Any) -> Iterator[Callable[[], Any]]:
    """``start()`` starts a beat of a database in which two entries are due. A beat stores the first run at once."""
    # Without the admin, which would keep the models: its pages failed in the tests that came after these.
    settings.INSTALLED_APPS = ["django_celery_beat"]
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {name: {"task": name, "schedule": schedule(HOUR)} for name in NAMES}

    class Recording(beat.DatabaseScheduler):  # type: ignore[misc, name-defined]
        def setup_schedule(self) -> None:
            self.sent: list[str] = []
            self.faults: list[type[BaseException]] = []
            super().setup_schedule()

        def send_task(self, name: str, *args: Any, **kwargs: Any) -> None:
            fault = self.faults.pop() if self.faults else None
            if fault is SystemExit:  # as Celery's handler of SIGTERM
                self.close()
            if fault is not None:
                raise fault
            self.sent.append(name)

    with django_db_blocker.unblock(), using_databases(default=sqlite_file(tmp_path)), ExitStack() as stack:
        with connection.schema_editor() as editor:
            for model in apps.get_app_config("django_celery_beat").get_models():
                editor.create_model(model)

        def start() -> Recording:
            started = Recording(app=app)
            stack.callback(started.close)
            return started

        start().close()  # it stores the entries
        entries().update(last_run_at=app.now() - 2 * HOUR)
        yield start


def entries() -> Any:
    from django_celery_beat.models import PeriodicTask

    return PeriodicTask.objects.filter(name__in=NAMES)


def tick(scheduler: Any) -> list[str]:
    for _ in range(3):
        scheduler.tick()
    return sorted(scheduler.sent)


def lose(scheduler: Any) -> None:
    """Let the leader learn that its term is lost."""
    lock("celery-beat:shop").reset()
    with suppress(LockLost):
        scheduler._term.extend()


def test_what_a_killed_leader_published_is_not_published_again_when_the_schedule_is_read_anew(
    start: Callable[[], Any],
) -> None:
    from django_celery_beat.models import PeriodicTasks

    killed, following = start(), start()
    assert tick(killed) == NAMES
    lock("celery-beat:shop").reset()
    assert tick(following) == []
    PeriodicTasks.update_changed()  # somebody saves an entry; it is also read anew every 5 minutes
    assert tick(following) == []
    following.sync()
    assert [entry.total_run_count for entry in entries()] == [1, 1]


@pytest.mark.parametrize("faults", [[OSError, OSError], [SystemExit]], ids=["the broker is away", "it is stopped"])
def test_entries_that_could_not_be_published_are_published_by_the_next_leader(
    start: Callable[[], Any], faults: list[type[BaseException]]
) -> None:
    first = start()
    first.faults = faults
    with suppress(SystemExit):
        assert tick(first) == []
    first.close()
    assert tick(start()) == NAMES


def test_a_duplicate_that_raises_has_run_also_when_the_schedule_is_read_anew(start: Callable[[], Any]) -> None:
    """It passed for a failed publication: whenever somebody saved an entry, it was published again."""
    from django_celery_beat.models import PeriodicTasks

    first = start()

    @first.app.task(name="report", shared=False, lazy=False)
    @single_instance(scope="job", on_duplicate="raise")
    def report() -> None:
        pass

    report.delay()
    assert tick(first) == ["bills"]
    assert report.unlock()
    PeriodicTasks.update_changed()
    assert tick(first) == ["bills"]
    assert report.lock_info() is None, "nothing was published"
    first.close()
    assert tick(start()) == []
    assert report.lock_info() is None
    assert [entry.total_run_count for entry in entries()] == [1, 1]


def test_a_beat_that_is_stopped_amid_a_publication_stores_the_runs_before_it(start: Callable[[], Any]) -> None:
    """None of an entry's runs was stored, because the last one had not happened yet."""
    stopped = start()
    assert tick(stopped) == NAMES
    entry = next(event.entry for event in stopped._heap if event.entry.name == "bills")
    for fault in (None, SystemExit):
        stopped.faults = [fault]
        reserved = stopped.reserve(entry)
        with suppress(SystemExit):
            stopped.apply_entry(entry)
        entry = reserved
    assert stopped.sent.count("bills") == 2
    assert entries().get(name="bills").total_run_count == 2


def test_a_beat_whose_term_is_lost_overwrites_no_later_run_in_the_database(start: Callable[[], Any]) -> None:
    frozen = start()
    assert tick(frozen) == NAMES
    lose(frozen)
    later = frozen.app.now()
    entries().update(last_run_at=later, total_run_count=5)  # by the next leader
    frozen.sync()
    frozen.close()
    assert set(entries().values_list("last_run_at", "total_run_count")) == {(later, 5)}


@pytest.mark.parametrize("change", ["made anew", "switched off and on", "given a start"])
def test_a_task_that_is_to_start_later_does_so_whatever_ran_under_its_name_before(
    start: Callable[[], Any], change: str
) -> None:
    """A reminder that had run before, and was set for another time, was switched off and never published."""
    from django_celery_beat.models import IntervalSchedule, PeriodicTask

    every_day, _ = IntervalSchedule.objects.get_or_create(every=1, period="days")
    options = {"name": "remind", "task": "remind", "interval": every_day, "one_off": change == "made anew"}
    task = PeriodicTask.objects.create(**options)
    if change != "given a start":
        PeriodicTask.objects.filter(name="remind").update(last_run_at=task.date_changed - 2 * 24 * HOUR)
    before = start()
    assert ("remind" in tick(before)) is (change != "given a start")
    before.close()
    now = before.app.now()
    if change == "made anew":
        task.delete()
        task = PeriodicTask(**options)
    else:
        task.refresh_from_db()
        for task.enabled in (False, True) if change == "switched off and on" else (True,):
            task.save()
    task.start_time = now
    task.save()
    after = start()
    assert "remind" in tick(after)

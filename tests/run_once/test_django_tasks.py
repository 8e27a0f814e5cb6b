"""``@locked`` under the ``@task`` of Django 6.0 and newer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import django
import pytest

from django_redislock import held_locks, lock, locked
from tests.support.databases import sqlite_file
from tests.support.managed import Managed

if django.VERSION < (6, 0):
    pytest.skip("Django has tasks from 6.0 on", allow_module_level=True)

from tests.run_once import background

IMMEDIATE = "django.tasks.backends.immediate.ImmediateBackend"
DUMMY = "django.tasks.backends.dummy.DummyBackend"
TASKS = {"default": {"BACKEND": IMMEDIATE}, "worker": {"BACKEND": DUMMY}}


@pytest.fixture(autouse=True)
def _settings(settings: Any, locks_by_url: None) -> None:
    settings.TASKS = TASKS


@pytest.mark.parametrize(("name", "value"), [("report", []), ("areport", []), ("report_in_context", [1])])
def test_a_task_runs_under_its_lock(name: str, value: list[object]) -> None:
    result = getattr(background, name).enqueue(customer="acme")
    assert result.status == "SUCCESSFUL", result.errors
    assert result.return_value == [*value, "report:acme"]
    assert list(held_locks()) == []


def test_a_task_whose_lock_is_held_fails_or_is_skipped_as_it_says() -> None:
    with lock("report:acme"):
        failed = background.areport.enqueue(customer="acme")
        skipped = background.report_in_context.enqueue(customer="acme")
        other = background.areport.enqueue(customer="other")
    assert failed.status == "FAILED"
    assert failed.errors[0].exception_class_path == "django_redislock.exceptions.AcquireTimeout"
    assert (skipped.status, skipped.return_value) == ("SUCCESSFUL", None)
    assert other.status == "SUCCESSFUL"


def test_enqueueing_takes_no_lock() -> None:
    result = background.report.using(backend="worker").enqueue(customer="acme")
    assert result.status == "READY"
    assert list(held_locks()) == []
    assert background.report.call(customer="acme") == ["report:acme"]


def test_in_the_wrong_order_it_says_so() -> None:
    with pytest.raises(TypeError, match=r"locked\(\) decorates functions, not Task"):
        locked("export")(background.export)


def test_two_workers_run_tasks_of_one_lock_one_after_the_other(
    manage: Callable[..., Managed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("django_tasks_db", reason="django-tasks-db is not installed")
    run_log = tmp_path / "run_log"
    monkeypatch.setenv("EXPORT_RUN_LOG", str(run_log))
    options = {
        "INSTALLED_APPS": ["django_tasks_db", "django_redislock"],
        "DATABASES": {"default": sqlite_file(tmp_path)},
        "TASKS": {"default": {"BACKEND": IMMEDIATE}, "worker": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
    }
    enqueue = (
        'from tests.run_once.background import export; [export.using(backend="worker").enqueue() for _ in range(4)]'
    )
    for command in (("migrate",), ("shell", "-c", enqueue)):
        process = manage(*command, **options)
        assert process.wait() == 0, process.err
    worker = ("db_worker", "--backend", "worker", "--batch", "--no-startup-delay", "--interval", "0.1")
    workers = [manage(*worker, **options) for _ in range(2)]
    assert [each.wait() for each in workers] == [0, 0], [each.err for each in workers]
    assert run_log.read_text().split() == ["begin", "end"] * 4

"""The code on the page about Celery runs, and that of the page about migration from other packages for Celery."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from celery import Celery, _state

from django_redislock import TaskAlreadyRunning
from django_redislock.celery import DuplicateResult
from django_redislock.core import Lock, held_locks
from tests.support import name_of, wait_until

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "celery.rst").read_text() + (DOCS / "migration.rst").read_text().partition("\nFrom celery-once\n")[2]


@pytest.fixture(scope="module")
def page():
    """All code of the page, as one module."""
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", PAGE)
    # test_tenants.py runs what sets a schema.
    blocks = [block for block in blocks if "set_schema" not in block and "CACHES" not in block]
    code = "\n".join(line[4:] for block in blocks for line in block.splitlines())
    namespace: dict = {"__name__": "page"}
    before = _state._tls.current_app
    with Celery("page", broker="memory://", backend="cache+memory://") as app:
        app.conf.task_default_queue = "page"
        exec(compile(code, "celery.rst", "exec"), namespace)
        yield namespace
    _state._tls.current_app = before  # other tests' shared tasks belong to other apps


def test_the_first_example(client, page):
    assert page["build_report"].apply((3,)).get() == "built 3"


def test_which_scope(client, page, capsys):
    first = page["ask_for_refresh"](1)
    again = page["ask_for_refresh"](1)
    assert (type(again), again.id) == (DuplicateResult, first.id)
    assert capsys.readouterr().out == f"one waits already: {first.id}\n"


def test_operators(client, page):
    task = page["build_report"]
    assert task.lock_info(3) is None
    Lock(client, name_of(task, 3), label="page.build_report[id]").acquire()
    assert task.lock_info(3).label == "page.build_report[id]"
    assert task.unlock(3) is True
    assert task.lock_info(3) is None


def test_what_the_table_gives_for_celery_once(client, make):
    """base=QueueOnce, once={"keys": ["user_id"], "timeout": 600}"""
    task = make(
        lambda self, user_id, verbose=False: f"digest for {user_id}",
        scope="job",
        key=["user_id"],
        queue_life=600,
        on_duplicate="raise",
    )
    task.delay(1)
    with pytest.raises(TaskAlreadyRunning):
        task.delay(1, verbose=True)
    wait_until(lambda: [590 < info.ttl <= 600 for info in held_locks(client)] == [True])
    assert task.apply((2,)).get() == "digest for 2"


def test_what_the_table_gives_for_celery_singleton(client, make):
    """base=Singleton, unique_on=["user_id"], lock_expiry=600"""
    task = make(
        lambda self, user_id, source="upload": f"contacts of {user_id}", scope="job", key=["user_id"], queue_life=600
    )
    assert task.delay(1).id == task.delay(1, source="phone").id
    assert task.apply((2,)).get() == "contacts of 2"


def test_from_the_cookbook(client, page):
    task = page["import_feed"]
    with Lock(client, name_of(task, "https://example.org")):
        assert task.apply(("https://example.org",)).get() == "already being imported"
    assert task.apply(("https://example.org",)).get() == "imported https://example.org"


def test_in_tests(page):
    page["test_a_report_is_built_alone"]()

"""What depends on the broker, with RabbitMQ: tests of the other modules, on workers of every pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.celery_site import tasks
from tests.celery_site.harness import POOLS, Stage, Workers, ended, workers
from tests.test_celery_faults import test_child_killed_and_its_message_delivered_again  # noqa: F401
from tests.test_celery_redelivery import (  # noqa: F401
    test_the_only_copy_runs_when_the_child_was_killed,
    test_the_only_copy_runs_when_the_child_was_killed_before_its_result_was_stored,
)
from tests.test_celery_scopes import (  # noqa: F401
    only_prefork,
    stage,
    task,
    test_a_purged_message_frees_its_lock_within_its_life,
    test_a_revoked_message_frees_its_lock,
    test_canvases_end_though_a_duplicate_waits,
    test_job_lasts_over_retries,
    test_of_queued_and_run_one_waits_and_one_runs,
    test_while_one_waits_none_is_published,
)
from tests.test_celery_workers import (  # noqa: F401
    gated,
    holder,
    test_a_crowd_on_few_keys,
    test_raise_ends_everything_at_once,
    test_reschedule_runs_later_under_the_same_id_without_a_retry,
    test_skip_ends_everything_at_once_with_its_result,
    test_the_lock_is_released_however_a_task_ends,
    test_wait_runs_one_after_the_other,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]


@pytest.fixture(scope="module")
def crew(server, rabbitmq, tmp_path_factory) -> Iterator[Workers]:
    with workers(server, tmp_path_factory.mktemp("rabbitmq"), rabbitmq.url) as crew:
        crew.start_all()
        yield crew


@pytest.fixture(params=POOLS)
def pool(request) -> str:
    return request.param


def pytest_generate_tests(metafunc) -> None:
    """Kill only the children of prefork workers: the others have none, and would be killed themselves."""
    if "pool" in metafunc.fixturenames and "killed" in metafunc.function.__name__:
        metafunc.definition.add_marker(only_prefork)


def test_the_only_copy_runs_when_the_whole_worker_was_killed(crew):
    """The broker notices that the connection is gone, and gives its messages to the next worker."""
    doomed = Stage([crew.start("prefork", name="doomed", concurrency=1).wait_ready()])
    result = doomed.publish(tasks.dying_job, "once killed")
    doomed.diary.wait_for("start")
    assert "amqp://" in doomed.log
    doomed.workers[0].kill()
    doomed.workers = crew.of("prefork")
    doomed.consume()
    assert ended(result).result == f"ran {result.id}"
    assert len(doomed.diary.events("start")) == 2
    assert doomed.diary.events("overlap") == []

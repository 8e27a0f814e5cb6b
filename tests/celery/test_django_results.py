"""Results in the database of Django (django-celery-results): the end of a message is found in any time zone."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.processes

SITE = """
from django.core.management import call_command

call_command("migrate", verbosity=0)

import time
from celery import Celery
from django_redislock.celery import single_instance
from django_redislock.celery.message import DuplicateResult

app = Celery("site", broker="memory://", backend="django-db", set_as_current=True)
app.conf.timezone = args[0]

@app.task
@single_instance(scope="queued")
def report():
    pass

app.backend.mark_as_revoked("of yesterday")
report.apply_async(task_id="of yesterday")
say(kept=isinstance(report.delay(), DuplicateResult))
report.unlock()
first = report.delay()
since = report.lock_info().acquired_at.timestamp()
while time.time() < since + 0.002:
    pass
app.backend.mark_as_revoked(first.id)
say(again=not isinstance(report.delay(), DuplicateResult))
"""


@pytest.mark.parametrize(
    ("kind", "zone"), [("naive", "America/Los_Angeles"), ("naive", "Asia/Tokyo"), ("aware", "Asia/Tokyo")]
)
def test_after_a_revocation_the_task_is_published_again_and_not_before(server, run_python, kind, zone):
    """A naive time was read as UTC: west of it nothing was published, east of it a waiting message lost its lock."""
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.support.results_site",
        "RESULTS_REDIS": server.url,
        "RESULTS_TIMES": kind,
        "RESULTS_ZONE": zone,
    }
    assert run_python(SITE, zone, env=env, new=True).finish() == [{"kept": True}, {"again": True}]

"""A server that is full and evicts nothing: what takes memory is refused, and everything is given back all the same."""

from __future__ import annotations

import pytest
from celery.exceptions import Reject, Retry

from django_redislock.core import held_locks
from django_redislock.exceptions import LockBackendError
from tests.celery.deliveries import deliver, take
from tests.support import RedisServer

pytestmark = pytest.mark.processes

CASES = [
    {"scope": "run"},
    {"scope": "queued"},
    {"scope": "queued+run"},
    {"scope": "job"},
    {"scope": "run", "limit": 2},
    {"scope": "queued+run", "limit": 2},
    {"scope": "run", "keep_for": 60},
    {"scope": "queued+run", "on_duplicate": "replace"},
]


@pytest.fixture(scope="module", params=["valkey", "redis-server"])
def lock_server(request):
    with RedisServer(None if request.param == "valkey" else request.param) as server:
        yield server


@pytest.fixture
def full(lock_server, settings):
    """A client of the server of the locks, which `fill` fills."""
    settings.DJANGO_REDISLOCK = {"URL": lock_server.url}
    with lock_server.client() as client:
        client.flushall()
        yield client
        client.config_set("maxmemory", "0")


def fill(client):
    client.config_set("maxmemory", "1")  # and nothing is evicted


@pytest.mark.parametrize("acks_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("ends", ["returns", "fails", "rejects", "retries"])
@pytest.mark.parametrize("options", CASES, ids=lambda options: " ".join(map(str, options.values())))
def test_a_task_gives_its_lock_back(full, app, make, options, ends, acks_late):
    """It was said to be not released, and stayed for the expiry after each run."""

    def body(self, a=1):
        fill(full)
        match ends:
            case "fails":
                raise ZeroDivisionError
            case "rejects":
                raise Reject("no")
            case "retries":
                raise Retry("later")  # of which nothing is published here
        return "ran"

    task = make(body, **{"key": [], **options}, task_options={"acks_late": acks_late})
    task.delay()
    (message,) = take(app)
    deliver(app, message)
    left = [info.name for info in held_locks(full)]
    of_job = options["scope"] == "job" and ends == "retries"
    is_kept = of_job or ("keep_for" in options and ends in ("returns", "fails"))
    assert len(left) == is_kept
    assert is_kept or task.lock_info() is None


def test_a_copy_of_a_message_that_ended_on_a_full_server_does_not_run(full, app, make):
    ran = []
    task = make(lambda self: ran.append(fill(full)), key=[])
    task.delay()
    (message,) = take(app)
    for _ in range(2):
        deliver(app, message, redelivered=True)
        full.config_set("maxmemory", "0")
    assert len(ran) == 1


@pytest.mark.parametrize("replaces", [False, True])
def test_a_message_that_cannot_start_gives_its_place_back(full, app, make, replaces):
    """Also one with the newest arguments, which are as long as they may be, and replace others."""
    task = make(lambda self, a: a, key=[], scope="queued", on_duplicate="replace" if replaces else "return")
    task.delay(1)
    fill(full)
    if replaces:
        task.delay(2)
        task.delay(3)
    (message,) = take(app)
    assert deliver(app, message).type is LockBackendError
    assert list(held_locks(full)) == []

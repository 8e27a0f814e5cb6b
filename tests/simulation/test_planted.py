"""A simulation that finds nothing proves little: defects are planted, and each is found."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.simulation.explore import Found, explore
from tests.simulation.patches import planted
from tests.simulation.planted import NOT_FOUND, PLANTED

SEEDS = 2400
"""All but three are found within 800, unless a change of the package changes what the seeds draw."""
FIRST = {
    "fences come from the clock alone": 340,
    "a queue has no expiry": 180,
    "a reservation is forgotten at its end": 430,
    "a renewal keeps an end that a step of the clock made late": 340,
    "a reset ends a lock that somebody else took meanwhile": 430,
    "a reset hands the lock to nobody": 150,
    "the error of a computation wakes nobody": 530,
    "several refresh a stale value at once": 230,
    "a refused message may run": 430,
    "a late call of an execution that has left counts": 160,
    "an execution releases whatever holds the lock": 360,
    "the drift of clocks is not allowed for": 2220,
    "a silent server is waited for": 130,
    "a loop that ends leaves no thread that waits for its replies": 110,
    "nobody polls": 220,
    "an extension is believed before it is confirmed": 1680,
}
"""From which seed those are looked for that took half a second or more; then from 0."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name):
    kind, defect = PLANTED[name]
    first = FIRST.get(name, 0)
    with planted(defect), pytest.raises(Found):
        explore(chain(range(first, SEEDS), range(first)), kind)


@pytest.mark.parametrize("name", NOT_FOUND)
def test_a_defect_that_is_not_found_can_still_be_planted(name):
    kind, defect = NOT_FOUND[name]
    with planted(defect):
        explore(range(1), kind)

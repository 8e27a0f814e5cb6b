"""A simulation that finds nothing proves little: defects are planted, and each is found."""

from __future__ import annotations

import pytest

from tests.simulation.explore import Found, explore
from tests.simulation.planted import NOT_FOUND, PLANTED

SEEDS = 2000
"""All but one are found within 600, unless a change of the package changes what the seeds draw."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name):
    kind, plant = PLANTED[name]
    with plant(), pytest.raises(Found):
        explore(range(SEEDS), kind)


@pytest.mark.parametrize("name", NOT_FOUND)
def test_a_defect_that_is_not_found_can_still_be_planted(name):
    kind, plant = NOT_FOUND[name]
    with plant():
        explore(range(1), kind)

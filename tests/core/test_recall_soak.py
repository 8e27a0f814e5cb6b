"""Two processes are asked for their lock at random moments, are frozen and killed: no two ever believe to hold it.

Some asks on one server; 200 on each deployment with ``REDISLOCK_ASKS=200``.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from django_redislock import lock
from tests.matrix.arenas import DEPLOYMENTS
from tests.support import ON_A_CLUSTER, wait_until
from tests.support.asked_programs import hold_again_and_again

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ASKS = int(os.environ.get("REDISLOCK_ASKS", "0"))
EXPIRE = 0.9
QUICK = 8


def spans(ledger: Path) -> list[tuple[int, float, float]]:
    """Return the fence of each acquisition, and when its holder believed in it first and last."""
    found: dict[int, tuple[float, float]] = {}
    for line in ledger.read_text().splitlines():
        fence, at = line.split()
        first, last = found.get(int(fence), (float(at), float(at)))
        found[int(fence)] = min(first, float(at)), max(last, float(at))
    return sorted((fence, *span) for fence, span in found.items())


@pytest.mark.skipif(ON_A_CLUSTER, reason="it has a Cluster of its own")
@pytest.mark.parametrize("deployment", ["", "Cluster", "Sentinel"] if ASKS else [""])
def test_no_two_processes_believe_at_a_time_while_they_are_asked_frozen_and_killed(
    run_python: Any, tmp_path: Path, deployment: str
) -> None:
    arena, ledger, chance = DEPLOYMENTS[deployment](), tmp_path / "ledger", random.Random()

    def start() -> Any:
        process = run_python(hold_again_and_again, arena.url, str(ledger), EXPIRE)
        process.wait_for(event="ready")
        return process

    processes, asked, faults = [start(), start()], 0, 0
    try:
        with override_settings(DJANGO_REDISLOCK={"URL": arena.url}):
            while asked < (ASKS or QUICK):
                time.sleep(chance.uniform(0, EXPIRE))
                fault = chance.random()
                number = chance.randrange(2)
                if fault < 0.3:  # before the ask, in the midst of anything
                    processes[number].pause()
                asked += lock("a").recall(by="olga", reason="a deploy")
                if 0.3 <= fault < 0.45:
                    processes[number].kill()
                    processes[number] = start()
                elif fault < 0.3:
                    time.sleep(chance.uniform(0, 1.5 * EXPIRE))
                    processes[number].resume()
                faults += fault < 0.45
            newest = max(fence for fence, *_ in spans(ledger))
            wait_until(lambda: max(fence for fence, *_ in spans(ledger)) > newest, 20, "they hold it still")
    finally:
        for process in processes:
            process.close()
        arena.close()
    held = spans(ledger)
    assert len(held) > asked / 3
    for (fence, _, until), (later, since, _) in itertools.pairwise(held):
        assert until < since, f"{later} was believed {until - since:.3f} s before {fence} was over"
    print(f"{deployment or 'one server'}: {asked} asks, {faults} faults, {len(held)} acquisitions")

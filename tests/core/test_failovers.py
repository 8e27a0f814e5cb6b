"""Failovers by Sentinel under load: with confirmed locks no two holders.

REDISLOCK_FAILOVERS=40 makes so many in place of two; ``benchmarks/failovers.py`` measures, also without confirmation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "failovers.py"
NUMBER = int(os.environ.get("REDISLOCK_FAILOVERS", "2"))


@pytest.mark.long
@pytest.mark.processes
def test_with_confirmed_locks_no_two_threads_believe_to_hold_one(tmp_path):
    command = [sys.executable, str(SCRIPT), str(NUMBER), "--safe", "--parallel", "2", "--json"]
    kinds = ["--kind", "kill", "--kind", "partition", "--expire", "3"] if NUMBER == 2 else []
    run = subprocess.run([*command, *kinds], capture_output=True, text=True, timeout=60 * NUMBER, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["overlaps"] == []
    assert len(found["done"]) == NUMBER
    assert found["holders"] > NUMBER

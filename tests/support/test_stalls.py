"""Failed tests are repeated while a process stands still, and are judged otherwise."""

from __future__ import annotations

import _thread
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from .fork_server import ROOT
from .stalls import BESIDE, MARGIN, REPEATS, longest_since, monotonic, watch_others
from .waiting import wait_until

PLANTED = """
import os, subprocess, sys
from pathlib import Path

ROUNDS = Path(__file__).with_name("rounds")
STOP = "import os, signal, time; os.kill({0}, signal.SIGSTOP); time.sleep(0.6); os.kill({0}, signal.SIGCONT)"

def test_it():
    rounds = len(ROUNDS.read_text()) if ROUNDS.exists() else 0
    ROUNDS.write_text("." * (rounds + 1))
    if rounds < STALLS:
        subprocess.run([sys.executable, "-c", STOP.format(os.getpid())], check=True)
    assert rounds >= LOSSES
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stalls", "losses", "rounds", "repeats", "outcome"),
    [
        (1, 1, 2, 1, "1 passed"),  # lost in a stall
        (0, 99, 1, 0, "1 failed"),  # lost without a stall
        (1, 99, 2, 1, "1 failed"),  # lost in a stall, and once more without
        (99, 99, 1 + REPEATS, REPEATS, "1 failed"),
    ],
)
def test_a_failed_test_is_repeated_only_while_its_process_stands_still(
    tmp_path, stalls, losses, rounds, repeats, outcome
):
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED.replace("STALLS", str(stalls)).replace("LOSSES", str(losses)))
    options = ["-p", "tests.support.stalls", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(planted)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert outcome in run.stdout, run.stdout + run.stderr
    assert len((tmp_path / "rounds").read_text()) == rounds
    named = re.findall(r"test_it after a stall of \d\.\d s of its process, and \d\.\d s of another one", run.stdout)
    assert len(named) == repeats, run.stdout


def test_a_line_that_is_being_written_is_not_read(tmp_path, monkeypatch):
    """A run on a busy machine ended by it: the file had grown over a page of memory."""
    noted = tmp_path / "stalls"
    noted.write_text("9e9 0.5\n9e9")
    monkeypatch.setenv(BESIDE, str(noted))
    assert longest_since(monotonic())[1] == 0.5


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell it")
def test_a_process_that_waits_for_the_cpu_is_noticed():
    cpu = min(os.sched_getaffinity(0))
    spin = f"import os, sys; os.sched_setaffinity(0, {{{cpu}}}); os.nice(int(sys.argv[1]))\nwhile True: pass"
    noted = []

    def note(end, seconds):
        noted.append(seconds)
        if seconds >= MARGIN:
            sys.exit()  # the thread

    with ExitStack() as stack:
        for nice in ("0", "0", "0", "19"):
            mark = {"MARKED": "here"} if nice == "19" else {}
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", spin, nice], env=os.environ | mark))
            stack.callback(process.kill)
        _thread.start_new_thread(watch_others, (note, b"MARKED=here"))
        wait_until(lambda: max(noted, default=0) >= MARGIN)

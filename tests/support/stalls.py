"""How long a process stood still: a test that failed meanwhile is not judged but repeated.

A lock of a second is rightly lost when its process does not run for a second, and a bound on time says nothing about a
machine that stands still. A thread of each process that runs tests sleeps 20 ms at a time and notes how much longer it
took, and a process beside them does the same: the first finds a process that did not run, or whose other threads kept
the GIL; the second a machine that stood still. Where the system tells it, the process beside them also reads how long
each process that the tests have started waited for the CPU: a server or a worker that did not run.

Only a failed test is repeated, three times at most, and the run ends with the names of those that were. A lock that is
lost without a stall fails its test at once, and its report has the stack of every thread: a lock was lost twice in a
row because its watchdog did not wake, and nothing said where it was.
"""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

# Noted now, because a test that replaced `time.sleep` got the pauses of the thread below, without an end; partial,
# because freezegun replaces each reference to a function of `time`.
monotonic, sleep = partial(time.monotonic), partial(time.sleep)

TICK, NOTED = 0.02, 0.1
"""Seconds: a sleep; how much longer it has to take to be noted."""
MARGIN = 0.3
"""Seconds. The shortest locks of the tests live for half a second, and are renewed a third of a second before that."""
REPEATS = 3
BESIDE = "REDISLOCK_TEST_STALLS"
"""The environment variable that names the file of the process beside the tests; those that they start inherit it."""
LOOK = 0.1
"""Seconds between two looks at the other processes."""

_stalls: deque[tuple[float, float]] = deque(maxlen=1000)
_repeated: list[str] = []


def watch(note: Callable[[float, float], object]) -> None:
    """Call ``note(end, seconds)`` after each stall, for ever."""
    before = monotonic()
    while True:
        sleep(TICK)
        now = monotonic()
        if now - before - TICK > NOTED:
            note(now, now - before - TICK)
        before = now


def watch_others(note: Callable[[float, float], object], mark: bytes) -> None:
    """Call ``note(end, seconds)`` when a process with this mark in its environment waited for the CPU, for ever."""
    others: dict[Path, bool] = {}
    waited: dict[Path, int] = {}
    while True:
        sleep(LOOK)
        seen = {}
        for pid in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):  # it has ended
                if pid not in others:
                    others[pid] = mark in (pid / "environ").read_bytes()
                if others[pid]:
                    seen[pid] = int((pid / "schedstat").read_text().split()[1])
        longest = max((total - waited.get(pid, total) for pid, total in seen.items()), default=0) / 1e9
        waited = seen
        if longest > NOTED:
            note(monotonic(), longest)


def longest_since(began: float) -> tuple[float, float]:
    """Return the seconds of the longest stall since then: of this process, and of the one beside it."""
    # Without a line that is being written: one that crosses a page of memory comes in two parts.
    lines = Path(os.environ[BESIDE]).read_text().rpartition("\n")[0].splitlines()
    beside = [(float(end), float(seconds)) for end, seconds in map(str.split, lines)]
    mine, other = (max([s for end, s in each if end > began], default=0.0) for each in (list(_stalls), beside))
    return mine, other


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        handle, os.environ[BESIDE] = tempfile.mkstemp(prefix="redislock-stalls-")
        os.close(handle)
        process = subprocess.Popen([sys.executable, __file__, os.environ[BESIDE]], stdin=subprocess.PIPE)
        config.add_cleanup(lambda: _end(process))
    _thread.start_new_thread(watch, (lambda *stall: _stalls.append(stall),))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.communicate()
    Path(os.environ.pop(BESIDE)).unlink()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    repeats = []
    while True:
        began = monotonic()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        mine, beside = longest_since(began)
        if len(repeats) == REPEATS or max(mine, beside) < MARGIN or not any(report.failed for report in reports):
            break
        repeats.append(f"after a stall of {mine:.1f} s of its process, and {beside:.1f} s of another one")
    for report in reports:
        report.user_properties = [*report.user_properties, *(("repeated", repeat) for repeat in repeats)]
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.when == "call":
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)[-8:])}"
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        ]
        report.sections.append(("Threads", "\n".join(stacks)))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "setup":
        _repeated.extend(f"{report.nodeid} {why}" for name, why in report.user_properties if name == "repeated")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _repeated:
        terminalreporter.section("repeated, because a process stood still while they failed")
        for line in _repeated:
            terminalreporter.write_line(line)


if __name__ == "__main__":

    def _append(end: float, seconds: float) -> None:
        with Path(sys.argv[1]).open("a") as file:  # in one piece, because the tests may read at any time
            file.write(f"{end} {seconds}\n")

    _thread.start_new_thread(watch, (_append,))
    if Path("/proc/self/schedstat").exists():
        _thread.start_new_thread(watch_others, (_append, f"{BESIDE}={sys.argv[1]}".encode()))
    with suppress(KeyboardInterrupt):
        sys.stdin.read()  # it ends with the run of the tests

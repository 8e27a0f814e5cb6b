"""The checker passes the sample of the docs, finds what is planted in it, and finds defects of the package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.histories.check import histories, judge
from tests.simulation import __main__ as command
from tests.simulation.explore import history_of
from tests.simulation.history import simulated
from tests.simulation.patches import planted
from tests.simulation.planted import PLANTED

CHECK = Path(__file__).parent / "check.py"
SAMPLE = Path(__file__).parents[2] / "docs" / "history.jsonl"


def run(path):
    return subprocess.run([sys.executable, "-I", "-S", str(CHECK), str(path)], capture_output=True, text=True)


def test_the_checker_is_short_and_needs_python_only():
    assert len(CHECK.read_text().splitlines()) <= 110
    assert run(SAMPLE).returncode == 0  # without site-packages, and without this repository on the path


def test_nothing_misspelt_events_and_events_before_a_history_are_refused(tmp_path):
    path = tmp_path / "history"
    for text in ("", SAMPLE.read_text().replace('"believed"', '"belief"'), SAMPLE.read_text().partition("\n")[2]):
        path.write_text(text)
        found = run(path)
        assert found.returncode == 1
        assert "ValueError" in found.stderr, found


def test_the_sample_has_every_kind_of_line():
    events = {json.loads(line)["event"] for line in SAMPLE.read_text().splitlines()}
    assert events >= {"history", "granted", "empty", "believed", "freed", "fault"}


HEAD = {"event": "history", "history": 0, "source": "test", "holders": 1, "fences": True}
HEAD |= {"slack": 0.5, "free": 2.0, "late": 15.5}


def call(event, who, asked, at, timeout=None, shared=False):
    return {"event": event, "who": who, "name": "a", "asked": asked, "at": at, "timeout": timeout, "shared": shared}


def believed(who, since, until, fence, released=True, id=None):
    line = {"event": "believed", "who": who, "name": "a", "from": since, "until": until, "fence": fence}
    return line | {"id": id or who, "released": released, "expires": until + 1}


def fault(at, until, what="trouble", who="server", loses=()):
    return {"event": "fault", "at": at, "until": until, "what": what, "who": who, "loses": [*loses]}


def rules(*lines, **head):
    return [rule for rule, _ in judge(HEAD | head, [*lines])]


OVERLAP = believed("p", 1, 3, 1), believed("q", 2, 4, 2)


@pytest.mark.parametrize(
    ("lines", "broken"),
    [
        (OVERLAP, ["holders"]),
        ((believed("p", 1, 2, 2), believed("q", 3, 4, 2)), ["fences"]),
        ((believed("r", 0, 9, 1), call("granted", "p", 1, 9), call("granted", "q", 2, 5)), ["order"]),
        ((believed("p", 1, 2, 1), call("granted", "q", 1, 5), believed("q", 5, 6, 2)), ["liveness"]),
        ((believed("p", 1, 2, 1, False), call("waits", "q", 1, 6)), ["liveness"]),
        ((call("empty", "p", 1, 2, timeout=2.0),), ["answers"]),
        ((call("raised", "p", 1, 1.5),), ["answers"]),
        ((call("empty", "p", 1, 3, timeout=1.0),), ["answers"]),
        ((call("granted", "p", 1, 20, timeout=1.0), fault(2, 3)), ["answers"]),
    ],
)
def test_a_planted_line_breaks_a_rule(lines, broken):
    assert rules(*lines) == broken


@pytest.mark.parametrize(
    "lines",
    [
        (*OVERLAP, fault(1.5, 2.5, loses=["a"])),
        (*OVERLAP, {"event": "freed", "name": "a", "fence": 1, "at": 1.5}),
        (believed("p", 1, 3, 1, id="given"), believed("q", 2, 4, 1, id="given")),
        (call("granted", "p", 1, 9), call("granted", "q", 2, 5), fault(3, 4)),
        (believed("r", 0, 9, 1), call("granted", "p", 1, 9, shared=True), call("granted", "q", 2, 5)),
        (believed("p", 1, 2, 1, False), call("granted", "q", 1, 4), believed("q", 4, 5, 2)),
        (call("empty", "p 1", 1, 20, timeout=1.0), fault(2, 3, "frozen", "p 1")),
        (call("raised", "p", 1, 1.5), fault(0, 1.2)),
    ],
)
def test_a_known_exception_breaks_no_rule(lines):
    assert rules(*lines) == []


@pytest.mark.parametrize(
    "lines",
    [
        (*OVERLAP, fault(1.5, 2.5, loses=["another lock"])),
        (*OVERLAP, fault(2.5, 9.0, loses=["a"])),
        (*OVERLAP, fault(0.0, 9.0)),
        (*OVERLAP, {"event": "freed", "name": "a", "fence": 1, "at": 2.5}),
    ],
)
def test_what_is_no_exception_excuses_no_two_holders(lines):
    assert rules(*lines) == ["holders"]


def test_two_holders_are_right_where_two_are_promised_and_three_are_not():
    assert rules(*OVERLAP, holders=2) == []
    assert rules(*OVERLAP, believed("r", 2, 4, 3), holders=2) == ["holders"]


def test_an_overlap_planted_in_the_sample_is_found(tmp_path):
    lines = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    number, long = max(
        ((number, line) for number, line in enumerate(lines) if line["event"] == "believed"),
        key=lambda found: found[1]["until"] - found[1]["from"],
    )
    half = (long["from"] + long["until"]) / 2
    lines.insert(number, {**long, "who": "a stranger", "id": "other", "from": half, "fence": long["fence"] + 1})
    path = tmp_path / "planted"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = run(path)
    assert found.returncode == 1
    assert "a stranger" in found.stdout
    assert ": holders: " in found.stdout


def test_the_command_writes_histories_that_the_checker_passes(tmp_path, monkeypatch):
    path = tmp_path / "history"
    monkeypatch.setattr("sys.argv", ["simulation", "--seeds", "60", "--history", str(path)])
    command.main()
    with path.open() as file:
        found = histories(file)
    assert len(found) == 60
    assert [wrong for head, seen in found for wrong in judge(head, seen)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("two may take the lock at once", "holders"),
        ("fences do not grow", "fences"),
        ("who comes last is served first", "order"),
        ("a lock has no expiry", "liveness"),
    ],
)
def test_the_checker_finds_a_planted_defect_of_the_package(name, rule):
    kind, defect = PLANTED[name]
    with planted(defect), simulated():
        broken = set()
        for seed in range(200):
            lines = history_of(seed, kind).record(seed)
            broken |= {each for each, _ in judge(lines[0], lines[1:])}
            if rule in broken:
                return
    pytest.fail(f"{rule} was not broken, only {broken}")

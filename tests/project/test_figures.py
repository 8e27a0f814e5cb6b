"""The figures of the README are those that the benchmarks printed, benchmarks/figures.txt: none without a command."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.rst").read_text()
KEPT = (ROOT / "benchmarks" / "figures.txt").read_text()
_, _, REST = README.partition("\nHow fast is it?\n")
SECTION = " ".join(REST.partition("=\n\n")[2].partition("\n\n`Benchmarks")[0].split())


def runs(title: str, row: str, column: int) -> list[float]:
    """Return a figure of each kept run: of the tables that begin with this title, the cell of this row."""
    found = []
    for text in KEPT.split(f"\n{title}\n")[1:]:
        _, columns, rows = re.split(r"^(-[- ]+)$", text, maxsplit=1, flags=re.MULTILINE)
        (line,) = [line for line in rows.partition("\n\n")[0].splitlines() if re.match(rf"{re.escape(row)}  ", line)]
        found.append(float(line[slice(*list(re.finditer("-+", columns))[column].span())]))
    assert found, (title, row)
    return found


def times(figures: list[float], digits: int = 2) -> str:
    return " to ".join(dict.fromkeys(f"{figure:.{digits}f}" for figure in (min(figures), max(figures))))


def longer(title: str, row: str, column: int) -> str:
    """Return how many times as long a cycle takes, where the table has how many times as many there are in a second."""
    return times([1 / figure for figure in runs(title, row, column)])


def test_the_figures_of_the_readme_are_those_of_the_kept_runs():
    cycle, wakeup = "Uncontended cycle", "Release to acquire, one waiter"
    by_name = 'with lock("a"), renewed'
    many = "32 processes, 1 ms inside, 0 ms outside"
    claims = [
        f"take {longer(cycle, 'django-redislock, renewed', 2)} times as long as by hand",
        f"``with lock()`` {longer(cycle, by_name, 2)}",
        f"redis-py's lock {longer(cycle, 'redis-py Lock', 2)}",
        f"after {times(runs(wakeup, 'django-redislock, renewed', 3))} of python-redis-lock's time",
        f"redis-py's lock after {times(runs(wakeup, 'redis-py Lock', 3), 0)}.",
        f"takes {longer(many, 'django-redislock, renewed', 2)} times as long as python-redis-lock's",
        f"redis-py's {longer(many, 'redis-py Lock', 2)}",
        f"are {times(runs(many, 'django-redislock, renewed', 4))} of its waits",
        f"redis-py's lock {times(runs(many, 'redis-py Lock', 4))}",
    ]
    assert [claim for claim in claims if claim not in SECTION] == []
    figures = re.findall(r"\d+(?:\.\d+)? to \d+(?:\.\d+)?|\d+\.\d+", SECTION)
    assert [figure for figure in figures if not any(figure in claim for claim in claims)] == []

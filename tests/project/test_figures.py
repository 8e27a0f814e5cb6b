"""The figures of the README and the benchmarks' table are those that were printed: benchmarks/figures.txt."""

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


def check(text: str, claims: list[str]) -> None:
    """See that the text has these claims, and no other figures."""
    assert [claim for claim in claims if claim not in text] == []
    figures = re.findall(r"\d+(?:\.\d+)? to \d+(?:\.\d+)?|\d+\.\d+", text)
    assert [figure for figure in figures if not any(figure in claim for claim in claims)] == []


CYCLE, WAKEUP = "Uncontended cycle", "Release to acquire, one waiter"
OURS, REDIS_PY, OTHER = "django-redislock, renewed", "redis-py Lock", "python-redis-lock"
BY_NAME, BY_CACHE = 'with lock("a"), renewed', 'with cache.lock("a"), renewed'
FEW, MANY = "8 processes, 1 ms inside, 2 ms outside", "32 processes, 1 ms inside, 0 ms outside"


def test_the_figures_of_the_readme_are_those_of_the_kept_runs():
    claims = [
        f"take {longer(CYCLE, OURS, 2)} times as long as by hand",
        f"by hand (redis-py's lock {longer(CYCLE, REDIS_PY, 2)})",
        f"after {times(runs(WAKEUP, OURS, 3))} of python-redis-lock's time",
        f"redis-py's lock after {times(runs(WAKEUP, REDIS_PY, 3), 0)})",
        f"takes {longer(MANY, OURS, 2)} times as long as python-redis-lock's",
        f"(redis-py's {longer(MANY, REDIS_PY, 2)})",
        f"are {times(runs(MANY, OURS, 4))} of its waits",
        f"(redis-py's {times(runs(MANY, REDIS_PY, 4))})",
    ]
    check(SECTION, claims)


def cells(name: str) -> str:
    """Return the text of the rows of one benchmark in the table of benchmarks/README.rst, a cell after the other."""
    text = (ROOT / "benchmarks" / "README.rst").read_text()
    border, body = re.findall(r"^(=+  =+  =+)\nBenchmark .*\n\1\n((?:(?!=).+\n)+)\1$", text, re.MULTILINE)[0]
    columns = [slice(*column.span()) for column in re.finditer("=+", border)]
    found, within = [], False
    for line in body.splitlines():
        first = line[columns[0]].strip()
        within = first == f"``{name}``" if first.startswith("``") else within
        if within and first:
            found.append(["", ""])
        if within:
            found[-1] = [f"{cell} {line[column]}" for cell, column in zip(found[-1], columns[1:], strict=True)]
    assert found, name
    return " ".join(" ".join(cell.split()) for row in found for cell in row)


def test_the_figures_of_the_table_of_benchmarks_are_those_of_the_kept_runs():
    claims: dict[str, list[str]] = {"contention": []}
    claims["cycle"] = [
        f"{times(runs(CYCLE, OURS, 2))} of the floor written by hand",
        f"by ``lock()`` {times(runs(CYCLE, BY_NAME, 2))}, by",
        f"by ``cache.lock()`` {times(runs(CYCLE, BY_CACHE, 2))};",
        f"{times(runs(CYCLE, OURS, 3), 1)} commands",
        f"redis-py's Lock {times(runs(CYCLE, REDIS_PY, 2))}, by",
        f"by ``client.lock()`` {times(runs(CYCLE, 'redis-py, with client.lock()', 2))};",
        f"python-redis-lock {times(runs(CYCLE, OTHER, 2))} (renewed: {times(runs(CYCLE, f'{OTHER}, renewed', 2))})",
        f"pottery {times(runs(CYCLE, 'pottery Redlock', 2))}",
    ]
    claims["wakeup"] = [
        f"p50 {times(runs(WAKEUP, OURS, 3))} of python-redis-lock's",
        f"redis-py's Lock {times(runs(WAKEUP, REDIS_PY, 3), 0)}, pottery ",
        f"pottery {times(runs(WAKEUP, 'pottery Redlock', 3), 0)}",
    ]
    for title, label, digits in [
        (FEW, "8 processes", 0),
        (MANY, "32 processes, no pause outside", 1),
    ]:
        ratio, wait, jain = (times(runs(title, OURS, column)) for column in (2, 4, 5))
        commands = times(runs(title, OURS, 6), 1)
        slower, longer_wait = times(runs(title, REDIS_PY, 2)), times(runs(title, REDIS_PY, 4), digits)
        claims["contention"] += [
            f"{label}: {ratio} of {OTHER}'s cycles/s, Jain {jain}, p99 wait {wait}, {commands} commands a cycle",
            f"redis-py's Lock: {slower}, Jain {times(runs(title, REDIS_PY, 5))}, p99 {longer_wait} times",
        ]
    claims["contention"].append(
        f"{OTHER}: Jain {times(runs(title, OTHER, 5))}, {times(runs(title, OTHER, 6), 1)} commands"
    )
    for name, of in claims.items():
        check(cells(name), of)

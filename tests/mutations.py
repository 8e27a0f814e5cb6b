"""Random mutations of the package: what of the simulation and the quick tests finds each of them.

cosmic-ray was looked at: it has no sample by a seed, changes the tree that it runs in, and asks one command only.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

TOP = Path(__file__).parents[1]
MUTATED = ("core", "cache/lease", "celery/execution_lock.py")
NEAREST = {
    "core/quorum": ["tests/core/quorum"],
    "core/driver/cluster": ["tests/core/cluster", "tests/core/test_lock.py"],
    "core": ["tests/core", "--ignore=tests/core/cluster", "--ignore=tests/core/quorum"],
    "cache/lease": ["tests/cache"],
    "celery": ["tests/celery"],
}
"""The tests of each part; the first prefix counts that fits."""
HISTORIES = 400
EXPLORE = f"from tests.simulation.explore import explore; explore(range({HISTORIES}))"

Swap = dict[type[ast.AST], type[ast.AST]]
EQUALS: Swap = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
COMPARED = EQUALS | {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
COMPARED |= {ast.In: ast.NotIn, ast.NotIn: ast.In}
COMPUTED: Swap = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
LEFT_OUT = {"annotation", "returns", "decorator_list", "bases", "type_params"}


class Site(NamedTuple):
    """A place in a module's tree, and what is put there."""

    owner: ast.AST
    field: str
    index: int | None
    old: ast.AST
    new: ast.AST


class Mutation(NamedTuple):
    """One change of one module."""

    path: str
    line: int
    what: str
    text: str
    """The whole module with the change."""


def sites_in(owner: ast.AST) -> Iterator[Site]:
    """Return all places of a tree that can be changed, in the order of the text."""
    for field, value in ast.iter_fields(owner):
        if field in LEFT_OUT:
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                for new in _instead_of(child, field):
                    yield Site(owner, field, index, child, new)
                yield from sites_in(child)


def _instead_of(node: Any, field: str) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            yield ast.Compare(node.left, [COMPARED[type(op)]()], node.comparators)  # type: ignore[list-item]
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
        case ast.Constant(value=bytes()):
            yield ast.Constant(b"" if node.value else b"x")
        case ast.BinOp(op=op) if type(op) in COMPUTED:
            yield ast.BinOp(node.left, COMPUTED[type(op)](), node.right)  # type: ignore[arg-type]
        case ast.AugAssign(op=op) if type(op) in COMPUTED:
            yield ast.AugAssign(node.target, COMPUTED[type(op)](), node.value)  # type: ignore[arg-type]
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield ast.Call(ast.Name(NAMES[name]), node.args, node.keywords)
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            yield ast.Return(ast.Constant(None))
        case ast.Break() | ast.Continue():
            yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()
        case ast.Expr(value=ast.Constant()):  # a docstring
            pass
        case ast.Expr() | ast.Raise() | ast.Assign(targets=[ast.Attribute()]):
            yield ast.Pass()
    if field == "test" and not isinstance(node, ast.Compare | ast.UnaryOp | ast.BoolOp):
        yield ast.UnaryOp(ast.Not(), node)


def mutations(number: int, seed: int) -> list[Mutation]:
    """Draw so many mutations of the package."""
    package = TOP / "django_redislock"
    files = [file for part in MUTATED for file in sorted([package / part, *(package / part).rglob("*.py")])]
    trees = {file: ast.parse(file.read_text()) for file in files if file.is_file()}
    sites = [(file, site) for file, tree in trees.items() for site in sites_in(tree)]
    return [_mutation(file, trees[file], site) for file, site in random.Random(seed).sample(sites, number)]


def _mutation(file: Path, tree: ast.Module, site: Site) -> Mutation:
    def put(node: ast.AST) -> None:
        if site.index is None:
            setattr(site.owner, site.field, node)
        else:
            getattr(site.owner, site.field)[site.index] = node

    what = " -> ".join(" ".join(ast.unparse(node).split())[:90] for node in (site.old, site.new))
    put(site.new)
    text = ast.unparse(ast.fix_missing_locations(tree))
    put(site.old)
    line = getattr(site.old, "lineno", getattr(site.owner, "lineno", 0))
    return Mutation(str(file.relative_to(TOP)), line, what, text)


def found_by(copy: Path, seconds: float, tests: list[str]) -> str:
    """Return what fails in a copy of the tree: a rule of the simulation, or a test; or "nothing"."""
    well, output = _run(["-c", EXPLORE], copy, seconds)
    if not well:
        violation = re.findall(r"VIOLATION: (.*)", output)
        return f"simulation: {violation[-1]}" if violation else f"simulation, by an error: {_last_line(output)}"
    well, output = _run(["-m", "pytest", "-qx", "-m", "not slow", "-p", "no:randomly", *tests], copy, seconds)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return "nothing" if well else f"test: {failed[0] if failed else _last_line(output)}"


_stamps = iter(range(1_000_000_000, 2_000_000_000))


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    stamp = next(_stamps)  # or a file of the same size and second would have the bytecode of the one before
    os.utime(file, (stamp, stamp))


def _run(args: list[str], copy: Path, seconds: float) -> tuple[bool, str]:
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONHASHSEED": "0"}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, *args], cwd=copy, env=environment, start_new_session=True, **options)
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode == 0, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False, "the time limit"


def _last_line(output: str) -> str:
    return ([line for line in output.splitlines() if line.strip()] or ["no word"])[-1].strip()[:120]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--number", type=int, default=200, help="how many mutations")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the simulation, and again for the tests")
    parser.add_argument("--table", type=Path, default=Path("mutations.csv"), help="where the table is written")
    options = parser.parse_args()
    drawn = mutations(options.number, options.seed)
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as top, options.table.open("w", newline="") as table:
        for number in range(options.jobs):
            copies.put(copy := Path(top) / str(number))
            shutil.copytree(TOP, copy, ignore=shutil.ignore_patterns(".*_cache", ".git", "__pycache__"))
        rows = csv.writer(table)

        def look(mutation: Mutation) -> None:
            copy, part = copies.get(), mutation.path.removeprefix("django_redislock/")
            tests = next(tests for prefix, tests in NEAREST.items() if part.startswith(prefix))
            before = (copy / mutation.path).read_text()
            _write(copy / mutation.path, mutation.text)
            by = found_by(copy, options.seconds, tests)
            _write(copy / mutation.path, before)
            copies.put(copy)
            rows.writerow((mutation.path, mutation.line, mutation.what, by))
            table.flush()

        copy = copies.get()
        for tests in NEAREST.values():
            if (wrong := found_by(copy, 10 * options.seconds, tests)) != "nothing":
                sys.exit(f"Without a mutation something is found: {wrong}")
        copies.put(copy)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(look, drawn))


if __name__ == "__main__":
    main()

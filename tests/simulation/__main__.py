"""The command that explores."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

from .driver import Violation
from .explore import KINDS, Found, explore, explore_bounded, history_of, shrink
from .history import simulated
from .patches import planted
from .planted import NOT_FOUND, PLANTED

CHUNK = 500
WRITTEN = ["lock", "rlock", "replicas", "cluster"]
"""The kinds of histories that can be written: those of one lock."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many histories")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for how long at most")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=list(KINDS), help="histories of one kind; without it, the kinds take turns")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many processes explore")
    parser.add_argument("--bounded", type=int, metavar="N", help="all histories of a small world with N disturbances")
    parser.add_argument(
        "--planted", action="store_true", help="plant each defect; tell after how many histories it is found"
    )
    parser.add_argument("--seed", type=int, help="one history only")
    parser.add_argument("--story", action="store_true", help="tell the history of --seed; a failing one is made small")
    parser.add_argument(
        "--history", metavar="FILE", help="write what was seen as JSON lines; judge them by tests/histories/check.py"
    )
    options = parser.parse_args()
    if options.history is not None:
        _write(options)
        return
    if options.seed is not None:
        _one(options.seed, options.only, options.story)
        return
    if options.planted:
        _plant(options)
        return
    began = time.monotonic()
    try:
        number = _all(options, began)
    except Found as found:
        _tell(found.kind, found)
        sys.exit(1)
    seconds = time.monotonic() - began
    print(f"{number} histories in {seconds:.1f} s, {number / seconds:.0f} a second, and nothing was wrong")


def _all(options: Any, began: float) -> int:
    """Explore in several processes."""
    calls: list[tuple[Any, ...]] = []
    if options.bounded is not None:
        kinds = [options.only] if options.only else list(KINDS)
        calls = [
            (explore_bounded, kind, options.bounded, n, 2 * options.jobs)
            for n in range(2 * options.jobs)
            for kind in kinds
        ]
    seeds = iter(range(options.first, options.first + options.seeds, CHUNK))
    number, running = 0, set[Future[int]]()
    with ProcessPoolExecutor(options.jobs) as pool:
        while True:
            while len(running) < 2 * options.jobs and time.monotonic() - began < options.seconds:
                if calls:
                    running.add(pool.submit(*calls.pop()))
                elif options.bounded is None and (first := next(seeds, None)) is not None:
                    last = min(first + CHUNK, options.first + options.seeds)
                    running.add(pool.submit(explore, range(first, last), options.only))
                else:
                    break
            if not running:
                return number
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                if future.exception() is not None:
                    pool.shutdown(wait=False, cancel_futures=True)
                number += future.result()


def _plant(options: Any) -> None:
    """Print after how many histories, and by which rule, each planted defect is found."""
    for name, (kind, defect) in {**PLANTED, **NOT_FOUND}.items():
        if options.only in (None, kind):
            began = time.monotonic()
            try:
                with planted(defect):
                    explore(range(options.first, options.first + options.seeds), kind)
                seen = "not found"
            except Found as found:
                seen = f"{found.plan.seed - options.first + 1:5d}  {str(found.violation).rpartition('VIOLATION: ')[2]}"
            except Exception as error:
                seen = f"ERROR {error!r}"
            print(f"{kind:9}{time.monotonic() - began:6.1f} s  {name}: {seen}", flush=True)


def _write(options: Any) -> None:
    """Write histories of one lock to a file, and judge none of them."""
    kinds = [options.only] if options.only else WRITTEN
    with open(options.history, "w") as file, simulated():  # noqa: PTH123
        for number, seed in enumerate(range(options.first, options.first + options.seeds)):
            for line in history_of(seed, kinds[seed % len(kinds)]).record(number):
                file.write(json.dumps(line) + "\n")


def _one(seed: int, only: str | None, story: bool) -> None:
    with simulated():
        history = history_of(seed, only)
        try:
            history.run()
        except Violation as violation:
            failed = Found(history.kind, history.plan, violation)
        else:
            failed = None
    if story:
        print("\n".join(history.world.story))
    if failed is not None:
        _tell(history.kind, failed)
        sys.exit(1)


def _tell(kind: str, found: Found) -> None:
    """Print what went wrong, and the smallest history in which it does."""
    print(found, file=sys.stderr)
    plan, violation = shrink(kind, found.plan)
    print(f"\nThe same, made small:\n{plan}\n{violation}", file=sys.stderr)


if __name__ == "__main__":
    main()
